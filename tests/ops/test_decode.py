"""The single-token kernels against torch in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from quantkit.ops.decode import append, attention, can_append, can_attend, can_norm, norm

CUDA = torch.device("cuda")
RTOL = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # rounding of the result, RMSNorm rounds twice
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_cpu_tensors_are_not_for_these_kernels() -> None:
    assert not can_norm(torch.zeros(1, 64, dtype=torch.float16))
    assert not can_attend(torch.zeros(1, 2, 1, 64, dtype=torch.float16), torch.zeros(1, 2, 64, 64))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("columns", [64, 7168, 16384])
def test_norms_match_torch(columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 1, columns, device=CUDA) * 4 + 20).to(dtype)  # a mean far from zero
    weight, bias = torch.randn(columns, device=CUDA).to(dtype), torch.randn(columns, device=CUDA).to(dtype)
    assert can_norm(x)
    expected = layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    assert error(norm(x, weight, bias, 1e-5, centered=True), expected) < RTOL[dtype]
    expected = rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    assert error(norm(x, weight, None, 1e-6, centered=False), expected) < RTOL[dtype]


@pytest.mark.cuda
def test_norm_limits() -> None:
    assert not can_norm(torch.zeros(1, 16392, device=CUDA).half())
    assert not can_norm(torch.zeros(1, 60, device=CUDA).half())
    assert not can_norm(torch.zeros(1, 64, device=CUDA))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 64), (8, 2, 128), (3, 1, 256)])
@pytest.mark.parametrize("capacity", [5, 192, 1000])
def test_attention_matches_fp64(capacity: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    q = torch.randn(1, heads, 1, width, device=CUDA).to(dtype)
    keys, values = (torch.randn(1, kv_heads, capacity, width, device=CUDA).to(dtype) for _ in range(2))
    mask = torch.rand(1, 1, 1, capacity, device=CUDA) < 0.6
    mask[..., 0] = True
    assert can_attend(q, keys)
    wide_keys, wide_values = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
    scores = (q.double() @ wide_keys.transpose(2, 3) * 0.125).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) @ wide_values).transpose(1, 2)
    first = attention(q, keys, values, mask, 0.125)
    assert error(first, expected) < RTOL[dtype]
    assert torch.equal(attention(q, keys, values, mask, 0.125), first)


@pytest.mark.cuda
def test_append_writes_one_position_only() -> None:
    keys, values = torch.zeros(2, 1, 4, 192, 128, device=CUDA).half().unbind()
    key, value = torch.randn(2, 1, 1, 4, 128, device=CUDA).half().unbind()
    append(key.transpose(1, 2), value.transpose(1, 2), keys, values, torch.tensor([77], device=CUDA))
    assert torch.equal(keys[:, :, 77], key[:, 0])
    assert torch.equal(values[:, :, 77], value[:, 0])
    assert keys.count_nonzero() == key.count_nonzero()
    assert values.count_nonzero() == value.count_nonzero()


@pytest.mark.cuda
def test_unsupported_heads_are_refused() -> None:
    narrow = torch.zeros(1, 2, 1, 18, device=CUDA).half()
    assert not can_append(narrow, torch.zeros(1, 2, 64, 18, device=CUDA).half())
    q, keys = torch.zeros(1, 2, 1, 80, device=CUDA).half(), torch.zeros(1, 2, 64, 80, device=CUDA).half()
    assert not can_attend(q, keys)
    assert not can_attend(torch.zeros(1, 2, 2, 64, device=CUDA).half(), torch.zeros(1, 2, 64, 64, device=CUDA).half())
