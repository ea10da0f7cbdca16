"""The single-token kernels against torch in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.decode import op
from quantkit.ops.decode.instances import ATTENTION_BLOCKS, norm_unit
from quantkit.ops.decode.launch import Token
from quantkit.ops.decode.layout import (
    MOST_NORM_VALUES,
    can_attend,
    can_gate,
    can_norm,
    can_place,
    can_rotate,
    row_stride,
    token_stride,
)
from quantkit.ops.decode.op import add_norm, attention, gated, norm, place_prompt
from tests.ops.decode.cases import prompt_heads, token_behind_others

CUDA = torch.device("cuda")
RTOL = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # rounding of the result, RMSNorm rounds twice
SILU_NEIGHBOURS = 2e-3  # share of results next to the nearest: some units of fp32 in 2^13 of them to a 16-bit number
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def _angles(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of a rotary embedding."""
    angles = torch.rand(1, 1, width, device=CUDA) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def test_cpu_tensors_are_not_for_these_kernels() -> None:
    assert not can_norm(torch.zeros(1, 64, dtype=torch.float16))
    assert not can_attend(torch.zeros(1, 2, 1, 64, dtype=torch.float16), torch.zeros(1, 2, 64, 64))
    assert not can_gate(torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("columns", [64, 4104, 7168, 16384])
def test_norms_match_torch(columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 1, columns, device=CUDA) * 4 + 20).to(dtype)  # a mean far from zero
    weight, bias = torch.randn(columns, device=CUDA).to(dtype), torch.randn(columns, device=CUDA).to(dtype)
    assert can_norm(x)
    expected = layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    assert error(norm(x, weight, bias, 1e-5, centered=True), expected) < RTOL[dtype]
    expected = rms_norm(x.double(), (columns,), weight.double(), 1e-6)
    assert error(norm(x, weight, None, 1e-6, centered=False), expected) < RTOL[dtype]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("columns", [64, 7168, 16384])
def test_a_sum_is_normed_as_if_it_came_first(columns: int, dtype: torch.dtype) -> None:
    x, addend = (torch.randn(3, 1, columns, device=CUDA).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(columns, device=CUDA).to(dtype) for _ in range(2))
    for centered, shift in ((True, bias), (False, None)):
        total, normal = add_norm(x, addend, (weight, shift), 1e-5, centered=centered)
        assert torch.equal(total, x + addend)
        assert torch.equal(normal, norm(x + addend, weight, shift, 1e-5, centered=centered))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("count", [8, 1000, 28672])
def test_gates_match_torch(count: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 1, 1, count, device=CUDA).to(dtype).unbind()
    assert can_gate(gate, up)
    assert torch.equal(gated(gate, up, "relu"), gate.relu() * up)
    expected = (ACTIVATIONS["silu"].apply(gate) * up).double()
    assert error(gated(gate, up, "silu"), expected) < RTOL[dtype]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_silu_of_every_number_is_the_nearest_or_its_neighbour(dtype: torch.dtype) -> None:
    """Against fp64. What e^-x has no fp32 for, below -87, is 0, and infinity is what it is in torch."""
    gate = torch.arange(-(2**15), 2**15, device=CUDA).short().view(dtype)
    got, x = gated(gate, torch.ones_like(gate), "silu"), gate.double()
    assert torch.equal(got.isnan(), gate.isnan() | gate.isneginf())
    assert got[gate.isposinf()].isposinf().all()
    assert not got[(x < -90) & x.isfinite()].any()
    nearest = (x * torch.sigmoid(x)).to(dtype)
    common = (x.abs() < 80) & (nearest.abs() >= torch.finfo(dtype).tiny)
    steps = (got.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()[common]
    assert steps.max() <= 1
    assert steps.float().mean() < SILU_NEIGHBOURS


@pytest.mark.cuda
def test_gate_limits() -> None:
    halves = torch.zeros(1, 2 * 1004, device=CUDA).half()
    assert not can_gate(*halves.split(1004, dim=-1))
    assert not can_gate(*torch.zeros(2, 2 * 1004, device=CUDA).half().split(1004, dim=-1))
    assert not can_gate(torch.zeros(2, 64, device=CUDA).half()[:, ::2], torch.zeros(2, 32, device=CUDA).half())
    assert not can_gate(torch.zeros(64, device=CUDA), torch.zeros(64, device=CUDA))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_queries_are_scaled_and_rounded_first(width: int, dtype: torch.dtype) -> None:
    q, token, cache, mask = token_behind_others(width, dtype, CUDA)
    query_scale = width**-0.5
    scaled = q * query_scale
    torch.cuda.synchronize()
    expected = attention(scaled, token, cache, mask, 0.7)
    assert torch.equal(attention(q, token, cache, mask, 0.7, query_scale), expected)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_query_and_key_get_the_rotary_embedding_of_transformers(width: int, dtype: torch.dtype) -> None:
    q, token, (keys, values), mask = token_behind_others(width, dtype, CUDA)
    rotary = _angles(width, dtype)
    rotated_q, rotated_key = apply_rotary_pos_emb(q, token.key, *rotary)
    assert can_rotate(q, rotary)
    torch.cuda.synchronize()
    expected = attention(rotated_q, replace(token, key=rotated_key), (keys, values), mask, 0.7)
    keys[:, :, 280] = 0
    torch.cuda.synchronize()
    assert torch.equal(attention(q, replace(token, rotary=rotary), (keys, values), mask, 0.7), expected)
    assert torch.equal(keys[:, :, 280], rotated_key[:, :, 0])
    assert torch.equal(values[:, :, 280], token.value[:, :, 0])


def test_rotary_embeddings_of_another_type_or_size_are_not_taken() -> None:
    q, angles = torch.zeros(1, 4, 1, 64).half(), torch.zeros(1, 1, 64)
    assert can_rotate(q, (angles.half(), angles.half()))
    assert not can_rotate(q, (angles, angles))
    assert not can_rotate(q, (angles.half()[..., :32], angles.half()[..., :32]))


def test_the_longest_norm_has_an_instance() -> None:
    assert norm_unit(True, 0, MOST_NORM_VALUES)


@pytest.mark.cuda
def test_norm_limits() -> None:
    assert not can_norm(torch.zeros(1, 16392, device=CUDA).half())
    assert not can_norm(torch.zeros(1, 60, device=CUDA).half())
    assert not can_norm(torch.zeros(1, 64, device=CUDA))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 64), (8, 2, 128), (3, 1, 256)])
@pytest.mark.parametrize(
    ("capacity", "here"), [(5, 0), (192, 191), (1000, 700), (1024, 37), (4100, 4099), (9000, 8217), (9000, 40)]
)
def test_attention_matches_fp64(
    capacity: int, here: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    q = torch.randn(1, heads, 1, width, device=CUDA).to(dtype)
    own = [torch.randn(1, 1, kv_heads, width, device=CUDA).to(dtype).transpose(1, 2) for _ in range(2)]
    cache = [torch.randn(1, kv_heads, capacity, width, device=CUDA).to(dtype) for _ in range(2)]
    for tensor in cache:
        tensor[:, :, here] = float("nan")  # the token's place is not read before it is written
    mask = torch.rand(1, 1, 1, capacity, device=CUDA) < 0.6
    mask[..., : here // 3] = False  # whole splits of long caches
    mask[..., here], mask[..., here + 1 :] = True, False
    assert can_attend(q, cache[0])
    token = Token(own[0], own[1], torch.tensor([here], device=CUDA))
    first = attention(q, token, (cache[0], cache[1]), mask, 0.125)
    for tensor, new in zip(cache, own, strict=True):
        assert torch.equal(tensor[:, :, here], new[:, :, 0])
    wide_keys, wide_values = (t.double().repeat_interleave(heads // kv_heads, 1) for t in cache)
    scores = (q.double() @ wide_keys.transpose(2, 3) * 0.125).masked_fill(~mask, float("-inf"))
    expected = (scores.softmax(-1) @ wide_values).transpose(1, 2)
    assert error(first, expected) < RTOL[dtype]
    assert torch.equal(attention(q, token, (cache[0], cache[1]), mask, 0.125), first)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(("heads_per_kv", "capacity"), [(1, 300), (3, 70), (4, 5000), (7, 300)])
def test_every_block_gives_heads_of_one_cache_the_same(
    heads_per_kv: int, capacity: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(3, 2 * heads_per_kv, 1, width, device=CUDA).to(dtype)
    own = torch.randn(2, 3, 2, 1, width, device=CUDA).to(dtype)
    cache = torch.randn(2, 3, 2, capacity, width, device=CUDA).to(dtype)
    mask, here = torch.rand(3, 1, 1, capacity, device=CUDA) < 0.7, capacity - 3
    mask[..., here], mask[..., here + 1 :] = True, False
    token = Token(own[0], own[1], torch.tensor([here], device=CUDA), _angles(width, dtype))
    found = []
    for block in ATTENTION_BLOCKS:
        monkeypatch.setattr(op, "attention_block", lambda *_, block=block: block)
        keys, values = cache.clone()
        keys[:, :, here] = values[:, :, here] = float("nan")  # the token's place is not read before it is written
        found.append(attention(q, token, (keys, values), mask, 0.1))
        assert keys.isfinite().all()
        assert torch.equal(values[:, :, here], own[1][:, :, 0])
        assert torch.equal(attention(q, token, (keys, values), mask, 0.1), found[-1])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=RTOL[dtype], atol=RTOL[dtype])


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("sequences", [5, 200], ids=["few", "many"])
def test_sequences_of_a_batch_get_what_each_gets_alone(sequences: int, width: int, dtype: torch.dtype) -> None:
    q, token, (keys, values), mask = token_behind_others(width, dtype, CUDA, sequences=sequences)
    mask = mask & (torch.rand(sequences, 1, 1, 300, device=CUDA) < 0.7)
    mask[..., 280] = True
    merged = torch.cat([part.flatten(1) for part in (q, token.key, token.value)], 1)  # as a product of q, k and v
    parts = merged.split([part[0].numel() for part in (q, token.key, token.value)], 1)
    split = [part.view(sequences, -1, 1, width) for part in parts]
    torch.cuda.synchronize()
    together = attention(split[0], replace(token, key=split[1], value=split[2]), (keys, values), mask, 0.3)
    for i in range(0, sequences, 5):
        own = slice(i, i + 1)
        single = replace(token, key=token.key[own], value=token.value[own])
        alone = attention(q[own], single, (keys[own], values[own]), mask[own], 0.3)
        torch.testing.assert_close(together[own], alone, rtol=RTOL[dtype], atol=RTOL[dtype])
    assert torch.equal(keys[:, :, 280], token.key[:, :, 0])


@pytest.mark.cuda
@pytest.mark.sanitize
def test_gates_in_rows_that_stand_apart_match_torch() -> None:
    both = torch.randn(7, 1, 2 * 1000, device=CUDA).half()
    gate, up = both.split(1000, dim=-1)
    assert can_gate(gate, up)
    assert torch.equal(gated(gate, up, "relu"), gate.relu() * up)


def test_rows_are_even_or_not() -> None:
    x = torch.zeros(4, 3, 40)
    assert row_stride(x) == row_stride(x[:, :, :8]) == row_stride(x[:1]) == 40
    assert row_stride(x[:, :1, :8]) == 120
    assert row_stride(x[0, 0]) == 40
    assert row_stride(x[:, :2]) is None
    assert row_stride(x[..., ::2]) is None


@pytest.mark.cuda
def test_attention_writes_one_position_only() -> None:
    keys, values = torch.zeros(2, 1, 4, 192, 128, device=CUDA).half().unbind()
    key, value = torch.randn(2, 1, 4, 1, 128, device=CUDA).half().unbind()
    q, mask = torch.randn(1, 8, 1, 128, device=CUDA).half(), torch.ones(1, 1, 1, 192, device=CUDA).bool()
    attention(q, Token(key, value, torch.tensor([77], device=CUDA)), (keys, values), mask, 1.0)
    assert keys.count_nonzero() == key.count_nonzero()
    assert values.count_nonzero() == value.count_nonzero()


@pytest.mark.cuda
def test_unsupported_heads_are_refused() -> None:
    q, keys = torch.zeros(1, 2, 1, 80, device=CUDA).half(), torch.zeros(1, 2, 64, 80, device=CUDA).half()
    assert not can_attend(q, keys)
    assert not can_attend(torch.zeros(1, 2, 2, 64, device=CUDA).half(), torch.zeros(1, 2, 64, 64, device=CUDA).half())
    assert not can_attend(torch.zeros(1, 2, 1, 64, device=CUDA).half(), torch.zeros(1, 2, 64, 64, device=CUDA))


def check_placing(sequences: int, tokens: int, head_dim: int, dtype: torch.dtype, *, own_angles: bool) -> None:
    """To the bit; entries of the cache behind the prompt stay."""
    for rotates, scale in ((True, None), (True, 0.3), (False, 0.3), (False, None)):
        heads, angles, cache = prompt_heads(sequences, tokens, dtype, CUDA, head_dim, own_angles=own_angles)
        rotary = angles if rotates else None
        assert can_place(heads, cache[0], rotary)
        y = place_prompt(heads, rotary, cache, scale)
        q, k, v = heads
        q = q if scale is None else q * scale
        q, k = (q, k) if rotary is None else apply_rotary_pos_emb(q, k, *rotary)
        assert torch.equal(y, q)
        for stored, expected in zip(cache, (k, v), strict=True):
            assert torch.equal(stored[:, :, :tokens], expected)
            assert stored[:, :, tokens:].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("own_angles", [False, True], ids=["angles-of-all", "angles-of-each"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 2), (1, 333), (3, 1), (3, 65)])
def test_a_prompt_is_placed_as_transformers_does_it(
    sequences: int, tokens: int, head_dim: int, own_angles: bool, dtype: torch.dtype
) -> None:
    check_placing(sequences, tokens, head_dim, dtype, own_angles=own_angles)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_a_prompt_is_placed_inside_its_tensors(dtype: torch.dtype) -> None:
    check_placing(3, 17, 80, dtype, own_angles=True)


@pytest.mark.cuda
def test_what_the_prompts_kernel_cannot_read_is_known() -> None:
    heads, angles, cache = prompt_heads(2, 9, torch.float16, CUDA)
    (q, k, v), (keys, _) = heads, cache
    assert can_place(heads, keys, angles)
    assert not can_place((q.float(), k, v), keys, angles)
    assert not can_place((q, k, v[..., :32]), keys, angles)
    assert not can_place(heads, keys, (angles[0].float(), angles[1]))
    assert not can_place(heads, keys, (angles[0].mT.contiguous().mT, angles[1]))
    assert not can_place(heads, keys.mT.contiguous().mT, angles)


def test_tokens_are_evenly_apart() -> None:
    product = torch.zeros(2, 9, 8 * 64)
    heads = product.unflatten(-1, (8, 64)).transpose(1, 2)
    assert token_stride(heads) == 8 * 64
    assert token_stride(heads[:, 2:5]) == 8 * 64
    assert token_stride(heads[:, :, :1]) == 9 * 8 * 64
    assert token_stride(heads[:1, :, :1]) is not None
    assert token_stride(heads[:, :, ::2]) is None  # nine rows from a sequence to the next, but two from token to token
    assert token_stride(heads[..., 4:]) is None  # parts of heads
    assert token_stride(heads.contiguous()) is None
