// int8AttentionQuantize: keys and values to INT8 codes, in the tiles of int8_attention.cuh that int8Attention reads.
//
// Grid (tiles of 64 keys, heads of K and V, batch). Keys behind the last and dims behind the width are 0. K goes from
// registers to its place; V is turned through shared memory, whose pitch gives the 32 lanes 32 banks.
#include "int8_attention.cuh"

constexpr int kThreads = 256;

template <int kDim>
__device__ __forceinline__ int keyPlace(int key, int dim) {
    const int group = key / kGroupKeys * kGroupKeys * kDim, row = key % kGroupKeys;
    const int piece = dim / kPairDims, inPiece = dim % kPairDims;
    if (kDim % kPairDims != 0 && piece == kDim / kPairDims) {
        return group + piece * kPieceBytes + (row * 4 + inPiece / 8) * 8;
    }
    return group + piece * kPieceBytes + (row * 4 + inPiece / 16) * 16 + inPiece % 16;
}

// The dim that column g of column tile n of V holds.
__device__ __forceinline__ int columnDim(int n, int g) { return n / 4 * 32 + g / 2 * 8 + n % 4 * 2 + g % 2; }

template <int kDim>
__global__ void __launch_bounds__(kThreads)
    int8AttentionQuantize(const void* __restrict__ keys, const void* __restrict__ values,  // [batch, heads, T, dims]
                          uint8* __restrict__ tiles,                                       // int8_attention.cuh
                          float keyStep, float valueStep,  //
                          int keyBatch, int keyHead, int keyRow, int keyDims,  // strides in elements
                          int valueBatch, int valueHead, int valueRow, int valueDims,  //
                          int T, int dtype) {
    static_assert(kDim % 32 == 0, "columns of V come in four tiles of eight");
    constexpr int kPitch = kDim + 16;
    constexpr int kHalfBytes = kTileKeys * kDim;
    __shared__ __align__(16) uint8 staged[kTileKeys * kPitch];
    const int head = blockIdx.y, batch = blockIdx.z;
    uint8* out = tiles + ((size_t(batch) * gridDim.y + head) * gridDim.x + blockIdx.x) * 2 * kHalfBytes;
    const Source fromKeys{keys, keyBatch, keyHead, keyRow, keyDims, dtype};
    const Source fromValues{values, valueBatch, valueHead, valueRow, valueDims, dtype};
    const Step ofKeys = stepOf(keyStep), ofValues = stepOf(valueStep);
#pragma unroll 2
    for (int i = threadIdx.x; i < kHalfBytes / kRun; i += kThreads) {
        const int row = i / (kDim / kRun), dim = i % (kDim / kRun) * kRun, key = blockIdx.x * kTileKeys + row;
        float k[kRun] = {}, v[kRun] = {};
        if (key < T) {
            loadRun(fromKeys, rowStart(fromKeys, batch, head, key), dim, k);
            loadRun(fromValues, rowStart(fromValues, batch, head, key), dim, v);
        }
        *reinterpret_cast<uint2*>(out + keyPlace<kDim>(row, dim)) = runCodes(k, ofKeys);
        *reinterpret_cast<uint2*>(staged + row * kPitch + dim) = runCodes(v, ofValues);
    }
    __syncthreads();
    constexpr int kStepChunks = kStepKeys * kDim / 16;
    for (int i = threadIdx.x; i < kHalfBytes / 16; i += kThreads) {
        const int lane = i % kWarpSize, pair = i % kStepChunks / kWarpSize;
        const int key = i / kStepChunks * kStepKeys + lane % 4 * 2;
        uint32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint8* from = staged + (key + w % 2 * 16) * kPitch + columnDim(2 * pair + w / 2, lane / 4);
            words[w] = packBytes(from[0], from[kPitch], from[8 * kPitch], from[9 * kPitch]);
        }
        *reinterpret_cast<uint4*>(out + kHalfBytes + i * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
