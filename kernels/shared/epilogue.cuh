// What follows a product of a single token, in the product's last step: y = residual + activation(value). Every step
// rounds to y's type, as the kernels do that run one after the other otherwise.
#pragma once
#include "activation.cuh"

constexpr int kNoActivation = -1;

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

// One element of y; `residual`: what is added to it, read before, or null with `kept` unused.
__device__ __forceinline__ uint16 finished(float value, int activation, const uint16* residual, float kept, int dtype) {
    if (activation != kNoActivation) value = activatedBy(rounded(value, dtype), activation, dtype);
    if (residual) value = kept + rounded(value, dtype);
    return floatToShort(value, dtype);
}
