// Blocks of planes and products on Hopper as the fused product of experts has them: the values of levels.cuh and of
// gemm_products.cuh, in the order of instructions with which experts_gemm.cu was measured.
#pragma once
#include "gemm_products.cuh"

template <int kPlanes>
struct ExpertsBlock {
    static constexpr bool kStoredAsCodes = false;
    static constexpr bool kSigns = kPlanes == 4;
    uint32 even, odd, third, sign;  // even, odd: two planes at even and at odd columns, a pair of bits each

    __device__ __forceinline__ void take(const uint32* planes) {
        if constexpr (kPlanes == 1) {
            even = planes[0];
            return;
        }
        uint32 own[3];  // planes, or where planes 1 to 3 agree with plane 0
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if constexpr (kPlanes == 4) own[i] = planes[i + 1] ^ ~planes[0];
            else own[i] = i < kPlanes ? planes[i] : 0;
        }
        even = pick(own[0], own[1] << 1, kEvenBits);
        odd = pick(own[0] >> 1, own[1], kEvenBits);
        third = own[2];
        if constexpr (kPlanes == 4) sign = planes[0];
    }
    __device__ __forceinline__ uint32 word(int i) const { return i ? odd : even; }
    __device__ __forceinline__ uint32 selector(int s) const {
        if constexpr (kPlanes == 1) return (even >> s) & kNibbleOnes;
        const uint32 two = (s % 2 ? odd : even) >> (s / 2 * 2);
        if constexpr (kPlanes == 2) return two & kEvenPairs;
        const uint32 last = s < 2 ? third << (2 - s) : third >> (s - 2);
        return pick(two, last, kEvenPairs) & kIndexBits;
    }
    __device__ __forceinline__ uint32 negative(int s, bool upper) const {
        const uint32 evens = sign << (7 - s), odds = sign << (3 - s);
        return ~__byte_perm(evens, odds, upper ? 0x7362 : 0x5140) & kByteSigns;
    }
};

template <bool kWarpgroup, int kDtype, int kTokens>
struct ExpertsProductsOf : ProductsOf<kWarpgroup, kDtype, kTokens> {};
template <int kDtype, int kTokens>
struct ExpertsProductsOf<true, kDtype, kTokens> {
    struct Type : WarpgroupProducts<kDtype, kTokens> {
        __device__ __forceinline__ void take(uint32 stage, int) { this->start = (stage & 0x3FFFF) >> 4; }
        __device__ __forceinline__ void add(float* acc, uint32 a0, uint32 a1, uint32 a2, uint32 a3, int panel, int step) {
            const uint32 place = this->start + this->placeOf(panel, step);
            RegisterProduct<kDtype, kTokens>::add(acc, a0, a1, a2, a3, operandDescriptor(0) | place);
        }
    };
};
