// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset),  m < 2 tokens      (nuQmm Eq 1)
// on binary tensor cores, for group_size a multiple of 32.
//
// x becomes 16 bit planes per segment (planes.cuh), x ~ s c with codes c. Sign bits go from memory to the tensor
// core untouched (tiles.cuh), and two products with tensor cores make one number per row, segment and plane i:
//   binary   counts[row][p] = popcount(signs & plane p of the codes): 16 rows, 8 planes per instruction
//   fp16     v[row][j] = sum_p counts[row][p] 2^p (-2^15 for p = 15), the sum of the codes where the sign is 1
// A pair of counts, each below 2^10, is a pair of fp16 as it is: the denormal numbers count * 2^-24. The second product
// has eight columns and a (segment, plane i) needs one, so eight of those, a batch, share its sums; each brings a
// matrix that is zero but for column j. Sums stay below 2^24 and are exact. A lane then holds two rows of two columns:
//   sum_k x (2 sign - 1) = s * (2 v - P),   P = sum of the segment's codes
//
// Grid, shared memory and parameters: ring.cuh; a record there is one k tile of one token's planes.
#include "binary_step.cuh"

template <int kBits,      // planes of the weight
          int kSegment,   // columns per activation scale: 32, 64, 128 or 256, a divisor of the group size
          int kScaleBits, // of a scale and of an offset: 16, fp16, or 8
          int kTokens,    // tokens at once: 1 or 2
          int kWarps,     // warps per block
          int kStepTiles,     // tiles per stage of a warp's ring
          int kStages,     // stages per ring
          int kResident>  // blocks that a multiprocessor holds at once
__global__ void __launch_bounds__(kWarps * kWarpSize, kResident)
bcqBinaryGemv(const uint4* __restrict__ tiles, const void* __restrict__ scales, const uint16* __restrict__ factors,
              const uint16* __restrict__ x, const uint16* __restrict__ bias, const uint16* residual, uint16* __restrict__ y,
              int M, int N, int K, int groups, uint32 groupMagic, int entries, int passTiles, int rangeTiles,
              int longRanges, int dtype, int activation, int vectors) {
    static_assert(kTileK % kSegment == 0 && kSegment % kBitsPerWord == 0, "segments are whole words of a tile");
    multiplyWeight<BinaryProduct<kBits, kSegment, kScaleBits, kTokens, kStepTiles>, kWarps, kStages>(
        {tiles, scales, factors, x, bias, residual, y, M, N, K, groups, groupMagic, entries, passTiles,
         rangeTiles, longRanges, dtype, activation, vectors});
}
