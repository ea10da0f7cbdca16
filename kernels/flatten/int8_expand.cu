// int8Expand: INT4 codes to one byte per code, where the GPU has no INT4 products: the weight stays in nibbles in
// memory and is widened into a scratch operand before each product.
//
//   nibble tiles [blocks, k tiles of 256, 1, 64, 128] -> byte tiles [blocks, k tiles of 128, 1, 64, 128]
//
// grid: (k tiles of 256, row blocks). A thread takes 16-byte chunks: 32 codes in, two chunks out. Layouts: planes.cuh
// and quantize.cu.
#include "../bipolar/planes.cuh"

constexpr int kThreads = QK_EXPAND_THREADS;

// The low nibble of every byte, sign-extended: bit 3 times 30 sets bits 4 to 7, and no byte carries.
__device__ __forceinline__ uint32 extendNibbles(uint32 bytes) {
    constexpr uint32 kNibbles = 0x0F0F0F0Fu, kSigns = 0x08080808u, kUpper = 30u;
    const uint32 low = bytes & kNibbles;
    return low | (low & kSigns) * kUpper;
}

// Eight nibbles, lowest first, as eight bytes.
__device__ __forceinline__ uint2 widen(uint32 nibbles) {
    const uint32 even = extendNibbles(nibbles), odd = extendNibbles(nibbles >> 4);
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

__global__ void __launch_bounds__(kThreads)
    int8Expand(const uint8* __restrict__ tiles, uint8* __restrict__ codes, int kTiles) {
    for (int i = threadIdx.x; i < kBlockRows * kChunksPerLine; i += kThreads) {
        const int row = blockIdx.y * kBlockRows + i / kChunksPerLine, chunk = i % kChunksPerLine;
        const int kTile = 2 * blockIdx.x + chunk / 4;
        if (kTile >= kTiles) continue;
        const uint8* line = tiles + lineOffset(row, blockIdx.x, gridDim.x, 0, 1);
        const uint4 nibbles = *reinterpret_cast<const uint4*>(line + chunkOffset(chunk, row));
        const uint2 a = widen(nibbles.x), b = widen(nibbles.y), c = widen(nibbles.z), d = widen(nibbles.w);
        uint8* to = codes + lineOffset(row, kTile, kTiles, 0, 1);
        *reinterpret_cast<uint4*>(to + chunkOffset(chunk % 4 * 2, row)) = make_uint4(a.x, a.y, b.x, b.y);
        *reinterpret_cast<uint4*>(to + chunkOffset(chunk % 4 * 2 + 1, row)) = make_uint4(c.x, c.y, d.x, d.y);
    }
}
