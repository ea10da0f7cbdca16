// From a rounded activation to the code of one slice, for quantize.cu and int8_requantize.cuh:
//
//     code = sign(q) * clamp(|q| - top * segment, 0, top),      q = rint(x * multiplier)      (formats/flatten.py)
#pragma once
#include "../bipolar/planes.cuh"

// The code of clamp(size, 0, top) with the sign of ``signed_``, in the low byte. fmaxf makes 0 of NaN; the addition
// rounds half to even and leaves two's complement in the low bits.
__device__ __forceinline__ uint32 sliceBits(float size, float signed_, float top) {
    const float slice = copysignf(fminf(fmaxf(size, 0.f), top), signed_);
    return __float_as_uint(__fadd_rn(slice, 12582912.f));
}

// The code of a channel's first slice; scaled: x * multiplier.
__device__ __forceinline__ uint32 firstSlice(float scaled, float top) {
    return sliceBits(fabsf(scaled), scaled, top);
}

// The code of the slice behind ``full`` = top * segment steps.
__device__ __forceinline__ uint32 laterSlice(float scaled, float full, float top) {
    const float q = rintf(scaled);
    return sliceBits(__fsub_rn(fabsf(q), full), q, top);
}

// The low bytes of four words as one.
__device__ __forceinline__ uint32 packBytes(uint32 a, uint32 b, uint32 c, uint32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
