// GPTQ and cyclic descent over up to kMostColumns columns of one group, a row of the weight per thread.
//
//   round    v_i = w_i - sum_(j < i) U[j, i] e_j      level_i nearest to v_i      e_i = (v_i - level_i) / U[i, i]
//   descend  r_i = p_i - sum_(j < i) H[j, i] d_j      level_i nearest to old_i + r_i / H[i, i]      d_i = level_i - old_i
//
// U: the upper factor of the inverse Hessian (Frantar et al. 2022). p: (W - W') H (Behdin et al. 2023, Eq 11). Rows are
// independent; the columns of a row follow one another. A block is one warp, so that weights of few rows reach many
// multiprocessors. In shared memory: the factor, which all threads read at the same place, and for every thread a column
// of its values, which become its e or d, and a table of its levels. Sums over j are in order.
#include "levels.cuh"

namespace {

constexpr int kRows = QK_COLUMNS_ROWS;         // of a block
constexpr int kMostColumns = QK_MOST_COLUMNS;  // of a launch
constexpr int kPitch = kRows + 1;              // floats from a column to the next
constexpr int kCodePitch = kMostColumns + 4;   // bytes from a row to the next
static_assert(kRows == kWarpSize, "threads wait for each other as one warp");

// What a block keeps in shared memory, one behind the other.
template <int kBits>
struct Room {
    float* factor;  // [kMostColumns][kMostColumns]
    float* values;  // [kMostColumns][kPitch]
    LevelTable<kBits, kRows> table;
    uint8* codes;   // [kRows][kCodePitch]

    __device__ __forceinline__ explicit Room(float* start) {
        factor = start;
        values = factor + kMostColumns * kMostColumns;
        table.levels = values + kMostColumns * kPitch + threadIdx.x;
        uint8* bytes = reinterpret_cast<uint8*>(values + kMostColumns * kPitch + (kRows << kBits));
        table.codes = bytes + threadIdx.x;
        codes = bytes + (kRows << kBits);
    }

    __device__ __forceinline__ void loadFactor(const float* __restrict__ from, int C, int stride) {
        for (int row = 0; row < C; ++row) {
            for (int i = threadIdx.x; i < C; i += kRows) factor[row * kMostColumns + i] = from[size_t(row) * stride + i];
        }
    }

    // A value of this thread's row less what the columns before it have left over.
    __device__ __forceinline__ float reduced(int column) const {
        float value = values[column * kPitch + threadIdx.x];
#pragma unroll 8
        for (int j = 0; j < column; ++j) value -= factor[j * kMostColumns + column] * values[j * kPitch + threadIdx.x];
        return value;
    }

    __device__ __forceinline__ void storeCodes(uint8* __restrict__ to, int rows, int C, int stride) const {
        __syncwarp();
        for (int row = 0; row < rows; ++row) {
            for (int i = threadIdx.x; i < C; i += kRows) to[size_t(row) * stride + i] = codes[row * kCodePitch + i];
        }
    }
};

}  // namespace

// Grid: kRows rows a block. C: at most kMostColumns, all of one group.
template <int kBits>
__global__ void __launch_bounds__(kRows)
bcqRoundColumns(const float* __restrict__ values,  // [C, N]
                const float* __restrict__ factor,  // [C, C] factorStride apart, upper
                const float* __restrict__ scales,  // [kBits] planeStride apart, [N] rowStride apart
                const float* __restrict__ offset,  // [N] offsetStride apart
                float* __restrict__ stored,        // [C, N]
                float* __restrict__ errors,        // [C, N]
                uint8* __restrict__ codes,         // [N, C] codeStride apart
                int N, int C, int factorStride, int planeStride, int rowStride, int offsetStride, int codeStride) {
    extern __shared__ float shared[];
    Room<kBits> room(shared);
    const int first = blockIdx.x * kRows, row = first + threadIdx.x, known = min(row, N - 1);
    room.loadFactor(factor, C, factorStride);
    for (int i = 0; i < C; ++i) room.values[i * kPitch + threadIdx.x] = values[size_t(i) * N + known];
    RowCode<kBits> code;
    code.load(scales + size_t(known) * rowStride, planeStride, offset[size_t(known) * offsetStride]);
    room.table.make(code);
    __syncwarp();
    for (int i = 0; i < C; ++i) {
        const float value = room.reduced(i);
        const int rank = room.table.nearest(value);
        const float level = room.table.levels[rank * kRows];
        const float error = (value - level) / room.factor[i * kMostColumns + i];
        room.values[i * kPitch + threadIdx.x] = error;
        room.codes[threadIdx.x * kCodePitch + i] = room.table.codes[rank * kRows];
        if (row < N) {
            stored[size_t(i) * N + row] = level;
            errors[size_t(i) * N + row] = error;
        }
    }
    room.storeCodes(codes + size_t(first) * codeStride, min(kRows, N - first), C, codeStride);
}

// Grid and limits as above.
template <int kBits>
__global__ void __launch_bounds__(kRows)
bcqDescendColumns(const float* __restrict__ pressure,  // [N, C] pressureStride apart
                  const float* __restrict__ hessian,   // [C, C] hessianStride apart
                  const float* __restrict__ scales,    // as above
                  const float* __restrict__ offset,
                  uint8* __restrict__ codes,           // [N, C] codeStride apart, read and written
                  float* __restrict__ moved,           // [C, N]
                  int N, int C, int pressureStride, int hessianStride, int planeStride, int rowStride, int offsetStride,
                  int codeStride) {
    extern __shared__ float shared[];
    Room<kBits> room(shared);
    const int first = blockIdx.x * kRows, rows = min(kRows, N - first), known = first + min(int(threadIdx.x), rows - 1);
    room.loadFactor(hessian, C, hessianStride);
    for (int r = 0; r < rows; ++r) {
        for (int i = threadIdx.x; i < C; i += kRows) {
            room.values[i * kPitch + r] = pressure[size_t(first + r) * pressureStride + i];
            room.codes[r * kCodePitch + i] = codes[size_t(first + r) * codeStride + i];
        }
    }
    RowCode<kBits> code;
    code.load(scales + size_t(known) * rowStride, planeStride, offset[size_t(known) * offsetStride]);
    room.table.make(code);
    __syncwarp();
    if (threadIdx.x < rows) {
        for (int i = 0; i < C; ++i) {
            uint8& own = room.codes[threadIdx.x * kCodePitch + i];
            const float old = code.level(own);
            const int rank = room.table.nearest(old + room.reduced(i) / room.factor[i * kMostColumns + i]);
            const float step = room.table.levels[rank * kRows] - old;
            own = room.table.codes[rank * kRows];
            room.values[i * kPitch + threadIdx.x] = step;
            moved[size_t(i) * N + first + threadIdx.x] = step;
        }
    }
    __syncwarp();
    room.storeCodes(codes + size_t(first) * codeStride, rows, C, codeStride);
}
