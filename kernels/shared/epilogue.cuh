// The epilogue of a product: y = residual + activation(value), or of a weight whose rows are gates and ups in turn (kGatedRows
// of each), y = silu(gate) * up. Every step rounds to y's type, as it does where kernels of their own follow the product.
#pragma once
#include "activation.cuh"

constexpr int kNoActivation = QK_NO_ACTIVATION;
constexpr int kGated = QK_GATED;  // added to the number of a gate's activation, which are less
constexpr int kGatedRows = QK_GATED_ROWS;

__device__ __forceinline__ bool isGated(int activation) { return activation >= kGated; }

// Not inlined: tanh, erf and exp would stand in every instance's last loop.
__device__ __noinline__ float activatedBy(float x, int kind, int dtype) {
    switch (kind) {
        case kRelu: return x < 0.0f ? 0.0f : x;  // NaN stays, as torch's does
        case kGelu: return activated<kGelu>(x, dtype);
        case kGeluTanh: return activated<kGeluTanh>(x, dtype);
        case kSilu: return activated<kSilu>(x, dtype);
        case kGeluNew: return activated<kGeluNew>(x, dtype);
        default: return activated<kGeluFast>(x, dtype);
    }
}

// One element of y of a gated product.
__device__ __forceinline__ uint16 gatedElement(float gate, float up, int dtype) {
    return floatToShort(rounded(silu(rounded(gate, dtype)), dtype) * rounded(up, dtype), dtype);
}

// One element of y. residual: null without one; addend: its element, which the caller has read.
__device__ __forceinline__ uint16 withEpilogue(float value, int activation, const uint16* residual, float addend,
                                               int dtype) {
    if (activation != kNoActivation) value = activatedBy(rounded(value, dtype), activation, dtype);
    if (residual) value = addend + rounded(value, dtype);
    return floatToShort(value, dtype);
}
