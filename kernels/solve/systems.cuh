// Small symmetric positive definite systems in registers.
#pragma once

// right becomes the solution x of matrix x = right, by L D L^T without pivoting. Only the upper triangle of the matrix
// is read; D L^T stands there afterwards. Every division and sum is in the order of quantizers/bcq/systems.py.
template <int kSize, typename T>
__device__ __forceinline__ void solvePositive(T (&matrix)[kSize][kSize], T (&right)[kSize]) {
#pragma unroll
    for (int pivot = 0; pivot < kSize; ++pivot) {
#pragma unroll
        for (int row = pivot + 1; row < kSize; ++row) {
            const T factor = matrix[pivot][row] / matrix[pivot][pivot];
#pragma unroll
            for (int column = row; column < kSize; ++column) matrix[row][column] -= factor * matrix[pivot][column];
            right[row] -= factor * right[pivot];
        }
    }
#pragma unroll
    for (int row = kSize - 1; row >= 0; --row) {
#pragma unroll
        for (int column = row + 1; column < kSize; ++column) right[row] -= matrix[row][column] * right[column];
        right[row] /= matrix[row][row];
    }
}
