// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset),  m < 8 tokens      (nuQmm Eq 1)
// on INT8 tensor cores, for group_size a multiple of 32: binary_gemv.cu needs 16 columns of the tensor cores per
// token, this kernel two, but it has to make bytes of the signs first.
//
// x becomes two signed bytes per element (bytes.cuh), x ~ s c with codes c = 256 hi + lo. Bits become bytes 0 and
// -1 by one permutation per register (int8_step.cuh), so with every plane i
//   int8     h[row][2 m], h[row][2 m + 1] = sum_k -sign * hi, sum_k -sign * lo of token m: 16 rows, 4 tokens at once
//   v = -(256 h[2 m] + h[2 m + 1]), the sum of the codes where the sign is 1
//   sum_k x (2 sign - 1) = s * (2 v - P),   P = sum of the segment's codes
// |2 v - P| < 2^22, so added to the bits of 1.5 * 2^23 it is that number as fp32, and exact.
//
// One or two tokens have a product each, whose columns are word t of the lane's four and kind instead of token and kind:
// B is zero where the lane's word is not the column's, so one product adds up four words apart from each other. Groups
// narrower than half a tile cost no more than others then.
//
// Grid, shared memory and parameters: ring.cuh; a record there is one k tile of four tokens' bytes, or of one's.
#include "int8_step.cuh"

template <int kBits,      // planes of the weight
          int kSegment,   // columns per activation scale: 32, 64 or 128, a divisor of the group size
          int kScaleBits, // of a scale and of an offset: 16, fp16, or 8
          int kTokens,    // tokens at once: 4 or 8, or 1 or 2 for narrow groups
          int kWarps,     // warps per block
          int kStepTiles,     // tiles per stage of a warp's ring
          int kStages,     // stages per ring
          int kResident>  // blocks that a multiprocessor holds at once
__global__ void __launch_bounds__(kWarps * kWarpSize, kResident)
bcqInt8Gemv(const uint4* __restrict__ tiles, const void* __restrict__ scales, const uint16* __restrict__ factors,
            const uint16* __restrict__ x, const uint16* __restrict__ bias, const uint16* residual, uint16* __restrict__ y,
            int M, int N, int K, int groups, uint32 groupMagic, int entries, int passTiles, int rangeTiles,
            int longRanges, int dtype, int activation, int vectors) {
    static_assert(kTileK / 2 % kSegment == 0 && kSegment % kBitsPerWord == 0, "segments are whole words");
    multiplyWeight<Int8Product<kBits, kSegment, kScaleBits, kTokens, kStepTiles>, kWarps, kStages>(
        {tiles, scales, factors, x, bias, residual, y, M, N, K, groups, groupMagic, entries, passTiles,
         rangeTiles, longRanges, dtype, activation, vectors});
}
