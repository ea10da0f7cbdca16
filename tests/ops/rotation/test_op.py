"""The rotation of inputs as an op: the bits of the reference, whatever the shape, the type and the place in memory."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.hadamard import rotate
from quantkit.ops.rotation.op import rotate_inputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def test_the_reference_rounds_the_rotation_once() -> None:
    x = torch.randn(2, 3, 40)
    assert torch.equal(rotate_inputs(x.half()), rotate(x.half()).half())
    assert rotate_inputs(x[:0]).shape == (0, 3, 40)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [8, 40, 576, 1408, 4096, 14336], ids="K{}".format)
@pytest.mark.parametrize("rows", [0, 1, 65], ids="M{}".format)
def test_the_kernel_gives_the_bits_of_the_reference(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, columns).to(dtype)
    x[1:2] *= torch.finfo(dtype).smallest_normal
    x[2:3] = x[2:3].clamp(-1, 1) * 3e4
    assert torch.equal(rotate_inputs(x.cuda()).cpu(), rotate_inputs(x))


@pytest.mark.cuda
def test_rows_may_lie_anywhere_in_memory() -> None:
    whole = torch.randn(9, 1024 + 3).half()
    for x in (whole[:, 3:], whole.flatten()[1 : 1 + 8 * 1024].view(8, 1024)):  # with gaps; off a vector's place
        on_gpu = whole.cuda().flatten().as_strided(x.shape, x.stride(), x.storage_offset())
        assert torch.equal(rotate_inputs(on_gpu).cpu(), rotate_inputs(x))


@pytest.mark.cuda
def test_a_graph_replays_it() -> None:
    x = torch.randn(4, 1408, device="cuda").half()
    rotate_inputs(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rotate_inputs(x)
    x.copy_(torch.randn(4, 1408))
    graph.replay()
    assert torch.equal(y.cpu(), rotate_inputs(x.cpu()))
