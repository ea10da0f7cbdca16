// GPTQ and cyclic descent over up to kMostColumns columns of a weight in the trellis format, a ring of rows per block.
//
//   round    v_i = w_i - sum_(j < i) U[j, i] e_j      level_i the best path to v_i      e_i = (v_i - level_i) / U[i, i]
//   descend  r_i = p_i - sum_(j < i) H[j, i] d_j      level_i the best path to old_i + r_i / H[i, i]     d_i = level_i - old_i
//
// U, p: as in columns.cu. v_i, level_i: the rows of a ring (quantkit/formats/trellis.py). A path goes round the ring; it is
// found by the Viterbi algorithm, a state between two rows being the bits of the last kTaps - 1 of them
// (quantkit/quantizers/trellis/viterbi.py). The value of a window is a sum over its bits, so it is the sum of what
// its highest kBits bits give, which a thread has in registers, and of what the state behind the row gives.
// Threads share the states; a state's costs are in shared memory, and so are the branches that won, four bits for a
// state of a row, where they fit (else in memory).
#include "../shared/common.cuh"

namespace {

constexpr int kRing = QK_BLOCK_ROWS;           // rows of a ring, at most
constexpr int kMostColumns = QK_MOST_COLUMNS;  // of a block
constexpr float kImpossible = 1e30f;           // cost of a state that no path leads to

template <int kBits, int kTaps, int kBlockThreads>
struct Sizes {
    static constexpr int kBranches = 1 << kBits;
    static constexpr int kStateBits = kBits * (kTaps - 1);
    static constexpr int kStates = 1 << kStateBits;
    static constexpr int kPairs = kStates / 2;  // a thread's two neighbouring states have the same states before them
    static constexpr int kThreads = kBlockThreads;
    static constexpr int kPairsPerThread = (kPairs + kThreads - 1) / kThreads;
};

template <int kBits, int kTaps, int kThreads>
struct Room {
    using S = Sizes<kBits, kTaps, kThreads>;
    float* work;    // [kMostColumns][kRing]: values or pressure, less what the columns before have left over
    float* costs;   // [2][kStates]
    float* low;     // [kStates]: what the bits of the state behind a row give of its value
    float* target;  // [kRing]
    float* move;    // [kRing]
    float* best;    // [kThreads]
    uint32* state;  // [kThreads]
    uint32* windows;  // [kRing]
    uint8* came;    // [kRing][kPairs], of the last kRing steps

    __device__ __forceinline__ Room(float* start, uint8* scratch) {
        work = start;
        costs = work + kMostColumns * kRing;
        low = costs + 2 * S::kStates;
        target = low + S::kStates;
        move = target + kRing;
        best = move + kRing;
        state = reinterpret_cast<uint32*>(best + S::kThreads);
        windows = state + S::kThreads;
        came = scratch ? scratch : reinterpret_cast<uint8*>(windows + kRing);
    }
};

// What `bits` give by the taps from `tap` on, kBits bits each.
template <int kBits, int kTaps>
__device__ __forceinline__ float valueOf(uint32 bits, const float* __restrict__ filter, int tap, int taps) {
    float sum = 0.f;
    for (int d = 0; d < taps; ++d) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const float one = filter[i * kTaps + tap + d];
            sum += bits >> (d * kBits + i) & 1 ? one : -one;
        }
    }
    return sum;
}

// Viterbi over `steps` rows from row `first` on; returns which half of the costs holds those at the end.
template <int kBits, int kTaps, int kThreads>
__device__ __forceinline__ int forward(const Room<kBits, kTaps, kThreads>& room, const float (&high)[1 << kBits],
                                       const float* __restrict__ importance, int first, int steps, int ring) {
    using S = Sizes<kBits, kTaps, kThreads>;
    int half = 0;
    for (int step = 0; step < steps; ++step) {
        const int row = (first + step) % ring;
        const float x = room.target[row], weight = importance[row];
        const float* from = room.costs + half * S::kStates;
        float2* to = reinterpret_cast<float2*>(room.costs + (half ^ 1) * S::kStates);
#pragma unroll 4
        for (int i = 0; i < S::kPairsPerThread; ++i) {
            const int pair = threadIdx.x + i * S::kThreads;
            if (S::kPairs % S::kThreads && pair >= S::kPairs) break;
            const float2 low = reinterpret_cast<const float2*>(room.low)[pair];
            const float left[2] = {x - low.x, x - low.y};
            float least[2];
            uint32 branch[2] = {0, 0};
#pragma unroll
            for (int h = 0; h < S::kBranches; ++h) {
                const float before = from[h * (S::kStates / S::kBranches) + (2 * pair >> kBits)];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float error = left[j] - high[h], cost = before + weight * error * error;
                    if (h == 0 || cost < least[j]) least[j] = cost, branch[j] = h;
                }
            }
            to[pair] = make_float2(least[0], least[1]);
            room.came[step % kRing * S::kPairs + pair] = uint8(branch[0] | branch[1] << 4);
        }
        half ^= 1;
        __syncthreads();
    }
    return half;
}

// The window that led to `state` behind a step.
template <int kBits, int kTaps, int kThreads>
__device__ __forceinline__ uint32 windowOf(const Room<kBits, kTaps, kThreads>& room, int step, uint32 state) {
    using S = Sizes<kBits, kTaps, kThreads>;
    const uint32 branches = room.came[step % kRing * S::kPairs + state / 2];
    return (branches >> (state % 2 * 4) & 15) << S::kStateBits | state;
}

// The number of the least cost, the lowest of equal ones; for all threads.
template <int kBits, int kTaps, int kThreads>
__device__ __forceinline__ uint32 cheapest(const Room<kBits, kTaps, kThreads>& room, const float* costs) {
    using S = Sizes<kBits, kTaps, kThreads>;
    float least = 2 * kImpossible;
    uint32 found = 0;
    for (int n = threadIdx.x; n < S::kStates; n += S::kThreads) {
        if (costs[n] < least) least = costs[n], found = n;
    }
    room.best[threadIdx.x] = least, room.state[threadIdx.x] = found;
    __syncthreads();
    for (int distance = S::kThreads / 2; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) {
            const float other = room.best[threadIdx.x + distance];
            const uint32 state = room.state[threadIdx.x + distance];
            if (other < room.best[threadIdx.x] || (other == room.best[threadIdx.x] && state < room.state[threadIdx.x])) {
                room.best[threadIdx.x] = other, room.state[threadIdx.x] = state;
            }
        }
        __syncthreads();
    }
    return room.state[0];
}

// The windows of the best path round the ring to room.target: the state that it begins and ends with is that between two
// turns of a path from anywhere to anywhere.
template <int kBits, int kTaps, int kThreads>
__device__ __forceinline__ void codeRing(const Room<kBits, kTaps, kThreads>& room, const float (&high)[1 << kBits],
                                         const float* __restrict__ importance, int ring) {
    using S = Sizes<kBits, kTaps, kThreads>;
    for (int n = threadIdx.x; n < S::kStates; n += S::kThreads) room.costs[n] = 0.f;
    __syncthreads();
    const int half = forward<kBits, kTaps, kThreads>(room, high, importance, 0, 2 * ring, ring);
    const uint32 last = cheapest<kBits, kTaps, kThreads>(room, room.costs + half * S::kStates);
    if (threadIdx.x == 0) {
        uint32 state = last;
        for (int step = 2 * ring - 1; step >= ring; --step) state = windowOf<kBits, kTaps, kThreads>(room, step, state) >> kBits;
        room.state[0] = state;
    }
    __syncthreads();
    const uint32 start = room.state[0];
    for (int n = threadIdx.x; n < S::kStates; n += S::kThreads) room.costs[n] = n == start ? 0.f : kImpossible;
    __syncthreads();
    forward<kBits, kTaps, kThreads>(room, high, importance, 0, ring, ring);
    if (threadIdx.x == 0) {
        uint32 state = start;
        for (int row = ring - 1; row >= 0; --row) {
            const uint32 window = windowOf<kBits, kTaps, kThreads>(room, row, state);
            room.windows[row] = window;
            state = window >> kBits;
        }
    }
    __syncthreads();
}

}  // namespace

// Grid: (rings, ceil(C / kMostColumns)); where there is a matrix, C is at most kMostColumns. Block: kThreads.
template <int kBits, int kTaps, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
trellisColumns(const float* __restrict__ values,      // [C, N]: those to round, or the pressure
               const float* __restrict__ old,         // [C, N]: levels to descend from; null: round
               const float* __restrict__ matrix,      // [C, C] matrixStride apart: U or H; null: none to make up for
               const float* __restrict__ scales,      // [N]
               const float* __restrict__ importance,  // [N]: of squared errors in units of the scale
               const float* __restrict__ filter,      // [kBits, kTaps]
               float* __restrict__ stored,            // [C, N]: levels
               float* __restrict__ moves,             // [C, N]: e or d; null without a matrix
               uint8* __restrict__ codes,             // [C, N]
               uint8* __restrict__ scratch,           // null, or [blocks][kRing][kPairs]
               int N, int C, int matrixStride) {
    using S = Sizes<kBits, kTaps, kThreads>;
    extern __shared__ float4 shared[];
    const int firstRow = blockIdx.x * kRing, ring = min(kRing, N - firstRow);
    const int firstColumn = blockIdx.y * kMostColumns, columns = min(kMostColumns, C - firstColumn);
    const size_t block = blockIdx.y * gridDim.x + blockIdx.x;
    const Room<kBits, kTaps, kThreads> room(reinterpret_cast<float*>(shared),
                                  scratch ? scratch + block * kRing * S::kPairs : nullptr);
    const float* weights = importance + firstRow;
    float high[S::kBranches];
#pragma unroll
    for (int h = 0; h < S::kBranches; ++h) high[h] = valueOf<kBits, kTaps>(h, filter, kTaps - 1, 1);
    for (int n = threadIdx.x; n < S::kStates; n += S::kThreads) room.low[n] = valueOf<kBits, kTaps>(n, filter, 0, kTaps - 1);
    for (int i = threadIdx.x; i < columns * kRing; i += S::kThreads) {
        const int column = i / kRing, row = i % kRing;
        room.work[i] = row < ring ? values[size_t(firstColumn + column) * N + firstRow + row] : 0.f;
    }
    __syncthreads();
    for (int column = 0; column < columns; ++column) {
        const size_t place = size_t(firstColumn + column) * N + firstRow;
        const float diagonal = matrix ? matrix[size_t(column) * matrixStride + column] : 1.f;
        for (int row = threadIdx.x; row < ring; row += S::kThreads) {
            const float own = room.work[column * kRing + row];
            const float wanted = old ? old[place + row] + __fdividef(own, diagonal) : own;
            room.target[row] = __fdividef(wanted, scales[firstRow + row]);
        }
        __syncthreads();
        codeRing<kBits, kTaps, kThreads>(room, high, weights, ring);
        for (int row = threadIdx.x; row < ring; row += S::kThreads) {
            const uint32 window = room.windows[row];
            const float unit = room.low[window & (S::kStates - 1)] +
                               valueOf<kBits, kTaps>(window >> S::kStateBits, filter, kTaps - 1, 1);
            const float level = unit * scales[firstRow + row];
            const float move =
                old ? level - old[place + row] : __fdividef(room.work[column * kRing + row] - level, diagonal);
            room.move[row] = move;
            stored[place + row] = level;
            codes[place + row] = uint8(window & (S::kBranches - 1));
            if (matrix) moves[place + row] = move;
        }
        __syncthreads();
        if (!matrix) continue;
        for (int i = (column + 1) * kRing + threadIdx.x; i < columns * kRing; i += S::kThreads) {
            if (i % kRing < ring) room.work[i] -= matrix[size_t(column) * matrixStride + i / kRing] * room.move[i % kRing];
        }
        __syncthreads();
    }
}
