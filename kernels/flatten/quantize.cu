// flattenQuantize: smooth, round and split activations into INT8 or INT4 codes, one read of x and one write of codes.
//
// Column c of a row holds, with k = sourceChannel[c] and q = rint(x[k] * multiplier[k]),
//
//     code[c] = sign(q) * clamp(|q| - top * sourceSegment[c], 0, top)      (FlattenQuant Eq 1-3, formats/flatten.py)
//
// where multiplier[k] = 1 / (act_scale * smooth_scale[k]), one number where smoothing was folded into the model. The
// first K columns are channels 0 .. K - 1 with segment 0; those behind gather. Half to even; NaN gives 0 and Inf the
// largest slice; the same fp32 operations as ops/flatten/op.py, so the same bits.
//
//   block = tokensPerBlock (a power of 2 up to 64) rows of x, staged in shared memory by asynchronous
//           copies (kStaged; a row that does not fit is read from global memory). Other blocks of the multiprocessor
//           hide the wait.
//   thread = runs of 8 neighbouring columns: their map is read once for all rows of the block
//
// kLayout kRowMajor: codes [M, KExt] of one byte. kByteTiles, kNibbleTiles: the operand order of planes.cuh, a line of
// 128 or 256 columns; columns behind the last are 0 up to the end of a line, rows behind the last are left alone.
// A nibble line holds column 2 b in the low half of byte b.
#include "codes.cuh"
#include "../shared/mma.cuh"

constexpr int kRun = 8;
constexpr int kRowAlignment = QK_ROW_ALIGNMENT;  // of a staged row, and of one asynchronous copy

enum Layout : int { kRowMajor = QK_ROW_MAJOR, kByteTiles = QK_BYTE_TILES, kNibbleTiles = QK_NIBBLE_TILES };

constexpr int elementBytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// What eight neighbouring columns read: channel, what is subtracted from |q|, and the factor that makes x into q.
struct Run {
    int channel[kRun];
    float full[kRun];
    float factor[kRun];
};

// 1 / (act_scale * smooth_scale): a number per channel, or one for all.
struct Multiplier {
    const float* table;
    float all;
    __device__ __forceinline__ float of(int channel) const { return table == nullptr ? all : table[channel]; }
};

// Eight codes as bytes, or as nibbles in the first word.
template <int kLayout>
__device__ __forceinline__ uint2 packRun(const uint32 (&code)[kRun]) {
    if constexpr (kLayout == kNibbleTiles) {
        uint32 word = 0;
#pragma unroll
        for (int i = 0; i < kRun; i++) word |= (code[i] & 0xFu) << (4 * i);
        return make_uint2(word, 0);
    } else {
        return make_uint2(packBytes(code[0], code[1], code[2], code[3]), packBytes(code[4], code[5], code[6], code[7]));
    }
}

// Where a run of eight columns goes in every row of a block of kBlockRows rows, which a thread block never leaves.
template <int kLayout>
struct Destination {
    uint8* start;  // of the row block's lines in this column's k tile; kRowMajor: of the columns in the row block
    int chunk, byte, KExt, column;

    __device__ __forceinline__ Destination(uint8* codes, int row, int column, int KExt, int kTiles)
        : KExt(KExt), column(column) {
        if constexpr (kLayout == kRowMajor) {
            start = codes + size_t(row - row % kBlockRows) * KExt + column;
            chunk = byte = 0;
        } else {
            constexpr int kPerByte = kLayout == kNibbleTiles ? 2 : 1, kPerLine = kLineBytes * kPerByte;
            const int inLine = column % kPerLine / kPerByte;
            start = codes + lineOffset(row - row % kBlockRows, column / kPerLine, kTiles, 0, 1);
            chunk = inLine / kChunkBytes;
            byte = inLine % kChunkBytes;
        }
    }

    __device__ __forceinline__ void store(int rowInBlock, uint2 run) const {
        if constexpr (kLayout == kRowMajor) {
            uint8* to = start + size_t(rowInBlock) * KExt;
            if (KExt % kRun == 0) {
                *reinterpret_cast<uint2*>(to) = run;
                return;
            }
            for (int i = 0; i < min(kRun, KExt - column); i++) {
                to[i] = uint8((i < 4 ? run.x : run.y) >> (8 * (i % 4)));
            }
        } else {
            uint8* to = start + rowInBlock * kLineBytes + chunkOffset(chunk, rowInBlock & 7) + byte;
            if constexpr (kLayout == kNibbleTiles) {
                *reinterpret_cast<uint32*>(to) = run.x;
            } else {
                *reinterpret_cast<uint2*>(to) = run;
            }
        }
    }
};

// Eight neighbouring elements of a staged row at a multiple of eight.
template <int kDtype>
__device__ __forceinline__ void loadRun(const uint8* row, int column, float (&value)[kRun]) {
    const uint4* from = reinterpret_cast<const uint4*>(row + size_t(column) * elementBytes(kDtype));
    if constexpr (kDtype == kFloat32) {
        const uint4 low = from[0], high = from[1];
        const uint32 word[kRun] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kRun; i++) value[i] = __uint_as_float(word[i]);
    } else {
        const uint4 all = *from;
        const uint32 word[kRun / 2] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < kRun; i++) value[i] = shortToFloat(uint16(word[i / 2] >> (16 * (i % 2))), kDtype);
    }
}

// Eight neighbouring numbers of a map, or zeros behind its end.
__device__ __forceinline__ void loadMap(const int* map, int column, int KExt, int (&entry)[kRun]) {
    const int* from = map + column;
    if (column + kRun <= KExt && reinterpret_cast<size_t>(from) % kChunkBytes == 0) {
        const int4 low = reinterpret_cast<const int4*>(from)[0], high = reinterpret_cast<const int4*>(from)[1];
        const int all[kRun] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kRun; i++) entry[i] = all[i];
    } else {
#pragma unroll
        for (int i = 0; i < kRun; i++) entry[i] = column + i < KExt ? from[i] : 0;
    }
}

// Copy whole rows that stand one behind the other; pitch: bytes from row to row in shared memory.
template <int kDtype>
__device__ __forceinline__ void stageRows(uint8* staged, const uint8* x, int tokens, int K, int pitch) {
    const int bytes = K * elementBytes(kDtype);
    if (bytes == pitch && reinterpret_cast<size_t>(x) % kRowAlignment == 0) {
        const uint32 shared = sharedAddress(staged);
        for (int i = threadIdx.x * kRowAlignment; i < tokens * bytes; i += blockDim.x * kRowAlignment) {
            copyAsync16(shared + i, x + i);
        }
        copyCommit();
        copyWait<0>();
    } else {
        constexpr int kElement = elementBytes(kDtype);
        for (int i = threadIdx.x; i < tokens * K; i += blockDim.x) {
            uint8* to = staged + size_t(i / K) * pitch + i % K * kElement;
            if constexpr (kElement == 4) {
                *reinterpret_cast<uint32*>(to) = reinterpret_cast<const uint32*>(x)[i];
            } else {
                *reinterpret_cast<uint16*>(to) = reinterpret_cast<const uint16*>(x)[i];
            }
        }
    }
    __syncthreads();
}

template <int kLayout, int kDtype, bool kStaged>
__global__ void __launch_bounds__(QK_QUANTIZE_THREADS, 2)
    flattenQuantize(const uint8* __restrict__ x,            // [M, K] of kDtype
                    const int* __restrict__ sourceChannel,  // [KExt]
                    const int* __restrict__ sourceSegment,  // [KExt]
                    const float* __restrict__ multiplier,   // [1], or [K] if perChannel
                    uint8* __restrict__ codes, int perChannel, int M, int K, int KExt, int top, int tokensPerBlock) {
    extern __shared__ __align__(16) uint8 staged[];
    constexpr int kElement = elementBytes(kDtype);
    constexpr int kPerLine = kLineBytes * (kLayout == kNibbleTiles ? 2 : 1);
    const int kTiles = (KExt + kPerLine - 1) / kPerLine;
    const int written = kLayout == kRowMajor ? KExt : kTiles * kPerLine;
    const int firstToken = blockIdx.x * tokensPerBlock, tokens = min(tokensPerBlock, M - firstToken);
    const int rowBytes = K * kElement;
    const int pitch = kStaged ? (rowBytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment : rowBytes;
    const uint8* source = x + size_t(firstToken) * rowBytes;
    if constexpr (kStaged) {
        stageRows<kDtype>(staged, source, tokens, K, pitch);
        source = staged;
    }
    const Multiplier factors{perChannel ? multiplier : nullptr, *multiplier};
    const float limit = float(top);

    const int firstInBlock = firstToken % kBlockRows;

    for (int column = threadIdx.x * kRun; column < written; column += blockDim.x * kRun) {
        const Destination<kLayout> destination(codes, firstToken, column, KExt, kTiles);
        uint32 code[kRun];
        if (kStaged && column + kRun <= K) {
            float factor[kRun];
#pragma unroll
            for (int i = 0; i < kRun; i++) factor[i] = factors.of(column + i);
            for (int r = 0; r < tokens; r++) {
                float value[kRun];
                loadRun<kDtype>(source + size_t(r) * pitch, column, value);
#pragma unroll
                for (int i = 0; i < kRun; i++) code[i] = firstSlice(__fmul_rn(value[i], factor[i]), limit);
                destination.store(firstInBlock + r, packRun<kLayout>(code));
            }
            continue;
        }
        Run run;
        int segment[kRun];
        loadMap(sourceChannel, column, KExt, run.channel);
        loadMap(sourceSegment, column, KExt, segment);
#pragma unroll
        for (int i = 0; i < kRun; i++) {
            run.full[i] = __int2float_rn(segment[i] * top);
            run.factor[i] = column + i < KExt ? factors.of(run.channel[i]) : 0.f;
        }
        for (int r = 0; r < tokens; r++) {
#pragma unroll
            for (int i = 0; i < kRun; i++) {
                const float value = loadElement(source + size_t(r) * pitch, run.channel[i], kDtype);
                code[i] = laterSlice(__fmul_rn(value, run.factor[i]), run.full[i], limit);
            }
            destination.store(firstInBlock + r, packRun<kLayout>(code));
        }
    }
}
