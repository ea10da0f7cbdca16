// The epilogue that writes the next Linear's activation codes instead of y: y is scaled, given its bias and rounded to
// the model's type as in int8_epilogue.cuh, goes through the activation function, and is quantized with the next
// Linear's multiplier and column map as in quantize.cu. The codes are written in byte tiles. An output feature of this
// product is a channel of the next Linear, and its K_ext columns are those of these codes.
//
// A warp handles 16 rows x 32 features at a time (int8_epilogue.cuh). Lane 4 g + t has features 8 t .. 8 t + 7 of rows
// g and g + 8: eight codes, one store, four lanes a sector. Channels that own further columns are read again from the
// warp's scratch, by other lanes: lane 8 r + c takes slot c of the 32 channels for rows r, r + 4, r + 8 and r + 12, so
// that columns of one row, which stand in channel order, are written by neighbouring lanes.
//
// Slots list every column behind the first N: its channel, in rising order, and its segment. Columns behind the last,
// up to the end of a line, and rows behind M are not written.
#pragma once
#include "../shared/activation.cuh"
#include "codes.cuh"
#include "int8_epilogue.cuh"

constexpr int kGroupRows = 16;                           // rows of a warp's run
constexpr int kScratchPitch = kRunRows + 4;              // floats from row to row: no bank is met twice
constexpr int kScratchFloats = kGroupRows * kScratchPitch;  // of a warp
constexpr int kSlotLanes = 8;                            // lanes that share a row
constexpr int kSlotRows = kWarpSize / kSlotLanes;        // rows at once

// The next Linear's operand.
struct Following {
    uint8* codes;             // tiles
    const float* multiplier;  // [N], or [1]
    const int* slots;         // [3, slotCount]: column, channel, segment
    const int* slotStarts;    // [N / 32 rounded up + 1]: first slot of every 32 channels
    int perChannel, slotCount, top, activation;
};

__device__ __forceinline__ float factorOf(const Following& next, int n, int N) {
    return n < N ? next.multiplier[next.perChannel ? n : 0] : 0.f;
}

// y of a lane in the model's type: eight features of a row, then of the row eight behind it, two a word.
template <int kDtype>
__device__ __forceinline__ void roundRun(const int* dots, const float (&scale)[kRunFeatures],
                                         const float (&bias)[kRunFeatures], uint32 (&word)[kRunFeatures]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float value[kRunFeatures];
        scaleRow(dots, half, scale, bias, value);
        packRow<kDtype>(value, word + half * kRunFeatures / 2);
    }
}

// One column behind the first N; none where segment is negative.
struct Slot {
    int column, channel, segment;
};

// This lane's slots among those of 32 channels: kSlotLanes apart, from ``index`` to before ``end``. The first is loaded
// ahead of the run that needs it.
struct LaneSlots {
    Slot slot;
    int index, end;
};

__device__ __forceinline__ Slot loadSlot(const Following& next, int index, int end) {
    if (index >= end) return {0, 0, -1};
    const int* slot = next.slots + index;
    return {slot[0], slot[next.slotCount], slot[2 * next.slotCount]};
}

__device__ __forceinline__ LaneSlots laneSlots(const Following& next, int first, int end, int lane) {
    const int index = first + lane % kSlotLanes;
    return {loadSlot(next, index, end), index, end};
}

// Byte of a column in the tiles for a row: in the block of 64 rows and the k tile of the column, and of these.
__device__ __forceinline__ int offsetInBlock(int column, int row) {
    const int byte = column % kLineBytes;
    return row % kBlockRows * kLineBytes + chunkOffset(byte / kChunkBytes, row) + byte % kChunkBytes;
}
__device__ __forceinline__ size_t blockOffset(int column, int row, int kTiles) {
    return lineOffset(row - row % kBlockRows, column / kLineBytes, kTiles, 0, 1);
}

// Eight neighbouring codes of a row; those of channels behind the last are left to their slots.
__device__ __forceinline__ void storeCodes(uint8* to, const uint32 (&code)[kRunFeatures], int features) {
    const uint2 packed = make_uint2(packBytes(code[0], code[1], code[2], code[3]),
                                    packBytes(code[4], code[5], code[6], code[7]));
    if (features >= kRunFeatures) {
        *reinterpret_cast<uint2*>(to) = packed;
        return;
    }
#pragma unroll
    for (int i = 0; i < kRunFeatures; i++) {
        if (i < features) to[i] = uint8(code[i]);
    }
}

// The codes of one slot in 16 rows from ``m`` on; q: this lane's first row of the slot's channel in the scratch.
__device__ __forceinline__ void writeSlot(const Following& next, const Slot& slot, const float* q, int m, int M,
                                          int kTiles, int lane) {
    static_assert(kSlotRows == 4, "neighbouring passes differ in bit 2 of the row, which the swizzle takes to bit 6");
    constexpr int kOtherChunk = kSlotRows * kChunkBytes;
    const float full = __int2float_rn(slot.segment * next.top);
    const int row = m + lane / kSlotLanes, offset = offsetInBlock(slot.column, row);
    uint8* block = next.codes + blockOffset(slot.column, m, kTiles);
#pragma unroll
    for (int pass = 0; pass < kGroupRows / kSlotRows; pass++) {
        const uint32 code = laterSlice(q[pass * kSlotRows * kScratchPitch], full, float(next.top));
        uint8* to = block + (pass % 2 ? offset ^ kOtherChunk : offset) + pass * kSlotRows * kLineBytes;
        if (row + pass * kSlotRows < M) *to = uint8(code);
    }
}

// Codes of 16 rows from ``m`` and 32 features from ``n`` on, both of the warp's first lane. word: y of this
// lane (roundRun); slots: of the 32 features; factor: of this lane's eight; scratch: kScratchFloats of this warp. Rows
// behind M and features behind N are not written.
template <int kDtype>
__device__ __forceinline__ void requantizeRun(uint32 (&word)[kRunFeatures], const Following& next, LaneSlots slots,
                                              const float (&factor)[kRunFeatures], float* scratch, int m,
                                              int n, int M, int N, int lane) {
    const int kTiles = (N + next.slotCount + kLineBytes - 1) / kLineBytes;
    const int own = lane % 4 * kRunFeatures, row = lane / 4;
    uint8* block = next.codes + blockOffset(n + own, m, kTiles);
    activate<kDtype>(word, next.activation);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int thisRow = row + 8 * half;
        float q[kRunFeatures];
        uint32 code[kRunFeatures];
#pragma unroll
        for (int i = 0; i < kRunFeatures; i++) {
            const uint32 pair = word[half * kRunFeatures / 2 + i / 2];
            q[i] = __fmul_rn(shortToFloat(uint16(pair >> (16 * (i % 2))), kDtype), factor[i]);
            code[i] = firstSlice(q[i], float(next.top));
        }
        float4* kept = reinterpret_cast<float4*>(scratch + thisRow * kScratchPitch + own);
        kept[0] = make_float4(q[0], q[1], q[2], q[3]);
        kept[1] = make_float4(q[4], q[5], q[6], q[7]);
        uint8* to = block + offsetInBlock(n + own, m + thisRow);
        if (m + thisRow < M) storeCodes(to, code, N - n - own);
    }
    __syncwarp();
    for (; slots.slot.segment >= 0; slots.slot = loadSlot(next, slots.index, slots.end)) {
        const float* q = scratch + lane / kSlotLanes * kScratchPitch + slots.slot.channel - n;
        writeSlot(next, slots.slot, q, m, M, kTiles, lane);
        slots.index += kSlotLanes;
    }
    __syncwarp();  // the scratch is read
}
