"""Runs every kind of bipolar kernel on shapes that fit no tile, and compares: to be started under compute-sanitizer.

python -m tests.ops.bipolar_odd_shapes, with PYTORCH_NO_CUDA_MEMORY_CACHING=1 so that every tensor is an allocation of
its own and an access behind its end is seen.
"""

from __future__ import annotations

import torch

from quantkit.cuda.bipolar_units import wgmma_tiles
from quantkit.ops.bipolar_kernels import expand, launch_gemv, launch_mma, launch_wgmma
from tests.ops.bipolar_problem import Problem

SHAPES = [(1, 5, 40), (7, 65, 1030), (65, 130, 264), (130, 257, 2050)]
WIDTHS = [(1, 1), (1, 2), (2, 2), (2, 4), (5, 7)]


def check(problem: Problem, y: torch.Tensor, kernel: str) -> None:
    """Raise AssertionError where y is not the reference's result, bit for bit."""
    assert torch.equal(y.cpu(), problem.expected()), f"{kernel} {problem.name}"


def run(problem: Problem) -> int:
    """Every kernel that multiplies these widths; returns how many launches were compared."""
    weight, columns = problem.weight(), problem.columns
    as_bytes = problem.weight_bits * problem.act_bits > 8
    bias = problem.bias.cuda()
    acts, y = problem.activations(False), problem.output()
    launch_gemv(acts, weight, bias, y, columns, problem.act_bits)
    check(problem, y, "gemv")
    operands = (expand(weight[0], columns), *weight[1:]) if as_bytes else weight
    acts, y = problem.activations(as_bytes), problem.output()
    launch_mma(acts, operands, bias, y, columns, problem.limits, as_bytes=as_bytes)
    check(problem, y, "mma")
    if torch.cuda.get_device_capability() != (9, 0):
        return 2
    planes = (1, 1) if as_bytes else (problem.weight_bits, problem.act_bits)
    tiles = wgmma_tiles(*planes, as_bytes)
    for tile in tiles:
        y = problem.output()
        launch_wgmma(tile, acts, operands, bias, y, columns, problem.limits)
        check(problem, y, str(tile))
    return 2 + len(tiles)


def main() -> None:
    """Run all and say how many results were compared."""
    torch.manual_seed(0)
    count = sum(run(Problem(shape, *widths, torch.float16)) for shape in SHAPES for widths in WIDTHS)
    print(f"{count} results compared")


if __name__ == "__main__":
    main()
