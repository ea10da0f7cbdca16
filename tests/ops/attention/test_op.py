"""INT8 attention: the reference against integers by hand, the kernels against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.attention.op import (
    Int8Attention,
    int8_attention,
    int8_attention_cuda,
    int8_attention_reference,
)

CUDA = torch.device("cuda")
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# The last bit of exp may put a code of P that lies between two on the other side, once in more than 10,000 codes.
CODES_APART = 1e-4
FP32_RTOL = 1e-6  # one fp32 rounding of the exact integer result, and of its scale
ONE_KEY = 1e5  # a factor of the scores that leaves all but the largest nothing


@dataclass(frozen=True)
class Case:
    """One problem; value_width 0: as the keys'."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    tokens: int = 7
    keys: int = 33
    width: int = 64
    value_width: int = 0
    dtype: torch.dtype = HALF
    mask: str = "none"
    causal: bool = False


def _operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Views with heads inside rows, as models have them."""
    shapes = (
        (case.batch, case.tokens, case.heads, case.width),
        (case.batch, case.keys, case.kv_heads, case.width),
        (case.batch, case.keys, case.kv_heads, case.value_width or case.width),
    )
    query, key, value = (torch.randn(shape).to(case.dtype).transpose(1, 2) for shape in shapes)
    return query, key, value


def _steps(*operands: Tensor) -> list[float]:
    """Of codes that clamp the largest tenth of the range."""
    return [0.9 * x.float().abs().max().item() / 127 for x in operands]


def _mask(case: Case) -> Tensor | None:
    """The first row sees no key, as in a padded batch."""
    shape = (case.batch, 1, case.tokens, case.keys)
    some = torch.rand(shape) < 0.5
    some[0, :, 0] = False
    if case.mask == "none":
        return None
    if case.mask == "bool":
        return some
    if case.mask == "of keys":
        return (torch.rand(case.batch, 1, 1, case.keys) < 0.5).expand(shape)
    if case.mask == "per head":
        bias = torch.randn(1, case.heads, case.tokens, case.keys)
        bias[:, :, 1::2, case.keys // 2 + 1 :] = -math.inf
        bias[:, :, 0] = -math.inf
        return bias
    dtype = {"fp16": HALF, "bf16": BFLOAT, "fp32": FLOAT}[case.mask]
    return torch.zeros(shape, dtype=dtype).masked_fill_(~some, torch.finfo(dtype).min)


def _on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device) for x in tensors]


def _assert_close(got: Tensor, expected: Tensor, case: Case, step: float) -> None:
    """Equal but for a few rows with a code of P off by one, which moves a result by two steps of V at most."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    apart = (got.double() - expected.double()).nan_to_num_(0.0).abs()
    assert apart.max().item() <= 2 * step
    codes = case.batch * case.heads * case.tokens * case.keys
    assert (apart.amax(dim=-1) > 0).sum().item() <= 2 + CODES_APART * codes


def _by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, steps: list[float], scaling: float) -> Tensor:
    """In int64 and fp64; seen [M, T]."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = ((x / s).round().clamp(-127, 127).long() for x, s in zip((query, key, value), steps, strict=True))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhmd,bhtd->bhmt", q, k).float() * (steps[0] * steps[1] * scaling)
    scores = scores.masked_fill(~seen, -math.inf)
    p = (torch.exp(scores - scores.amax(-1, keepdim=True)) * 127).round().long()
    sums = torch.einsum("bhmt,bhtd->bhmd", p, v).double()
    return (sums * steps[2] / p.sum(-1, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("keys", [7, 1024, 3000], ids="T{}".format)
def test_reference_is_integer_arithmetic(keys: int, causal: bool) -> None:
    case = Case(batch=2, heads=4, kv_heads=2, tokens=5, keys=keys, width=16, dtype=FLOAT)
    operands = _operands(case)
    steps = _steps(*operands)
    output = int8_attention_reference(Int8Attention(*operands, None, steps, 0.25, causal))
    seen = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5 if causal else keys)
    expected = _by_hand(*operands, seen, steps, 0.25)
    torch.testing.assert_close(output.double(), expected, rtol=FP32_RTOL, atol=FP32_RTOL * expected.abs().max().item())


@pytest.mark.parametrize("mask", ["bool", "fp16", "per head"])
def test_masks_say_the_same_in_every_form(device: torch.device, mask: str) -> None:
    case = Case(batch=2, tokens=20, keys=70, mask=mask)
    operands, given = _operands(case), _mask(case)
    assert given is not None
    seen = given if mask == "bool" else given > torch.finfo(HALF).min
    added = torch.where(seen, 0.0 if mask == "bool" else given.float(), -math.inf)
    steps = _steps(*operands)
    one, other = (int8_attention(*_on(device, *operands, m), steps, 0.125, False)[:, 1:].cpu() for m in (given, added))
    _assert_close(one, other, case, steps[2])


def test_causal_is_the_mask_of_a_triangle(device: torch.device) -> None:
    for tokens, keys in ((70, 70), (7, 100), (100, 40)):
        operands = _operands(Case(tokens=tokens, keys=keys))
        triangle = torch.ones(1, 1, tokens, keys, dtype=torch.bool).tril(keys - tokens)
        steps = _steps(*operands)
        causal = int8_attention(*_on(device, *operands, None), steps, 0.125, True)
        assert torch.equal(causal, int8_attention(*_on(device, *operands, triangle), steps, 0.125, False))


def test_rows_without_a_key_are_zero(device: torch.device) -> None:
    operands = _operands(Case(tokens=100, keys=40))
    output = int8_attention(*_on(device, *operands, None), _steps(*operands), 0.125, True)
    assert output[:, :60].count_nonzero() == 0
    assert output[:, 60:].abs().amax(dim=-1).min() > 0


def test_values_that_are_not_numbers(device: torch.device) -> None:
    query, key, value = _operands(Case(tokens=40, keys=90, heads=1))
    query[0, 0, 3, 5], query[0, 0, 4, 5], key[0, 0, 7, 1] = math.nan, math.inf, math.nan
    value[0, 0, 2, 9] = math.nan
    steps = [0.02, 0.02, 0.02]
    output = int8_attention(*_on(device, query, key, value, None), steps, 0.125, False).cpu()
    assert output[0, 3].isnan().all()
    assert output.isnan().sum() == 64
    query[0, 0, 4, 5], key[0, 0, 7, 1], value[0, 0, 2, 9] = 1000.0, 0.0, 0.0
    expected = int8_attention(*_on(device, query, key, value, None), steps, 0.125, False).cpu()
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())


def test_largest_codes_sum_exactly_over_many_keys(device: torch.device) -> None:
    keys = 5001  # 127 * 127 * 5001 is past 2^24
    query, key, value = (torch.ones(1, 1, n, 64) for n in (1, keys, keys))
    value[..., -1, :] = 126 / 127
    steps = [1 / 127] * 3
    output = int8_attention(*_on(device, query, key, value, None), steps, 1.0, False)
    assert output.unique().tolist() == pytest.approx([(127 * keys - 1) / (127 * keys)], rel=FP32_RTOL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Case(width=288), "heads of up to 256 values, not 288"),
        (Case(dtype=torch.float64), "of one type, fp16, bf16 or fp32"),
    ],
    ids=["width", "type"],
)
def test_what_no_kernel_takes_is_refused(change: Case, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        int8_attention_cuda(Int8Attention(*_operands(change), None, [1.0, 1.0, 1.0], 1.0, False))


def test_a_negative_scaling_is_refused() -> None:
    with pytest.raises(KernelError, match=r"no negative scaling on a GPU, and got -0\.5"):
        int8_attention_cuda(Int8Attention(*_operands(Case()), None, [1.0, 1.0, 1.0], -0.5, False))


def test_more_keys_than_a_sum_holds_are_refused() -> None:
    query, key = torch.zeros(1, 1, 1, 64).half(), torch.zeros(1).half().expand(1, 1, 140_000, 64)
    with pytest.raises(KernelError, match="up to 133144 keys, not 140000"):
        int8_attention_cuda(Int8Attention(query, key, key, None, [1.0, 1.0, 1.0], 1.0, False))


SIZES = [(1, 1), (7, 33), (65, 200), (1, 200), (65, 33), (300, 300)]
LONG = [(129, 1300), (1300, 129), (900, 1025), (577, 577)]  # more tiles than are in flight at once
CASES = [
    *(Case(tokens=m, keys=t) for m, t in SIZES),
    *(Case(tokens=m, keys=t, causal=True, width=128, heads=4) for m, t in SIZES),
    *(Case(tokens=m, keys=t, width=d, heads=4, causal=True) for d in (64, 128) for m, t in LONG),
    *(Case(batch=2, heads=12, kv_heads=3, tokens=700, keys=700, width=d, dtype=BFLOAT) for d in (64, 128)),
    *(
        Case(batch=2, heads=6, kv_heads=2, tokens=70, keys=70, width=d, causal=True)
        for d in (32, 80, 96, 128, 160, 256)
    ),
    *(Case(batch=2, tokens=40, keys=90, mask=mask) for mask in ("bool", "of keys", "per head", "fp16", "bf16", "fp32")),
    *(Case(tokens=70, keys=70, width=d, mask="bool") for d in (96, 128, 256)),
    *(Case(tokens=70, keys=70, width=128, dtype=dtype) for dtype in (BFLOAT, FLOAT)),
    Case(tokens=20, keys=50, width=20, value_width=36),
    Case(tokens=20, keys=50, width=192, value_width=128, dtype=BFLOAT, mask="bf16"),
]
IDS = [
    f"{c.batch}x{c.heads}of{c.kv_heads}-{c.tokens}x{c.keys}-d{c.width}-{str(c.dtype)[6:]}-{c.mask}"
    f"-{'causal' * c.causal}"
    for c in CASES
]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_kernels_match_the_reference(case: Case) -> None:
    operands, mask = _operands(case), _mask(case)
    steps = _steps(*operands)
    for scaling in (case.width**-0.5, 0.0):
        expected = int8_attention_reference(Int8Attention(*operands, mask, steps, scaling, case.causal))
        got = int8_attention(*_on(CUDA, *operands, mask), steps, scaling, case.causal).cpu()
        _assert_close(got, expected, case, steps[2])


@pytest.mark.cuda
@pytest.mark.parametrize("case", [Case(tokens=65, keys=200, width=d, causal=True) for d in (64, 96, 128, 256)])
def test_kernels_are_exact_where_exp_cannot_round_otherwise(case: Case) -> None:
    operands = _operands(case)
    steps = _steps(*operands)
    for scaling in (0.0, ONE_KEY):  # all codes of P are 127, or the largest alone
        expected = int8_attention_reference(Int8Attention(*operands, None, steps, scaling, True))
        got = int8_attention(*_on(CUDA, *operands, None), steps, scaling, True).cpu()
        assert torch.equal(got, expected)


@pytest.mark.cuda
@pytest.mark.sanitize
def test_rows_that_start_anywhere_are_read() -> None:
    case = Case(tokens=20, keys=50)
    query, key, value = (torch.randn(1, x.shape[2], x.shape[1], 67).half().transpose(1, 2) for x in _operands(case))
    steps = _steps(query, key, value)
    expected = int8_attention_reference(
        Int8Attention(query[..., 3:], key[..., 3:], value[..., 3:], None, steps, 0.125, False)
    )
    got = int8_attention(*(x.to(CUDA)[..., 3:] for x in (query, key, value)), None, steps, 0.125, False)
    _assert_close(got.cpu(), expected, case, steps[2])


@pytest.mark.cuda
def test_codes_round_as_division_does() -> None:
    """Steps whose reciprocal is not exact, values on and beside the middle between two codes, and steps near zero."""
    for step in (0.3, 1 / 127, 7.7e-5, 3e-39):
        middles = (torch.arange(-130, 130).double() + 0.5) * step
        value = torch.stack([middles.float(), middles.float().nextafter(torch.tensor(math.inf))], dim=-1)
        value = torch.nn.functional.pad(value, (0, 62))[None, None]
        query, key = torch.zeros(1, 1, 260, 64), torch.eye(260, 64)[None, None]
        mask = torch.eye(260, dtype=torch.bool)[None, None]  # a row is one code
        given = (query, key, value, mask)
        expected = int8_attention_reference(Int8Attention(*given, [1.0, 1.0, step], 1.0, False))
        got = int8_attention(*_on(CUDA, *given), [1.0, 1.0, step], 1.0, False).cpu()
        assert torch.equal(got, expected)


@pytest.mark.cuda
def test_results_repeat_and_a_graph_gives_the_same() -> None:
    case = Case(batch=2, heads=4, tokens=300, keys=300, width=128)
    operands = _operands(case)
    steps, given = _steps(*operands), _on(CUDA, *operands)
    first = int8_attention(*given, None, steps, 0.1, True)
    assert torch.equal(int8_attention(*given, None, steps, 0.1, True), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = int8_attention(*given, None, steps, 0.1, True)
    graph.replay()
    assert torch.equal(captured, first)


@pytest.mark.cuda
def test_heads_do_not_mix() -> None:
    case = Case(batch=2, heads=4, kv_heads=2, tokens=9, keys=40, width=64)
    operands = _operands(case)
    query, key, value = (x.to(CUDA) for x in operands)
    steps = _steps(*operands)
    whole = int8_attention(query, key, value, None, steps, 0.125, False)
    part = int8_attention(query[1:, 3:], key[1:, 1:], value[1:, 1:], None, steps, 0.125, False)
    assert torch.equal(whole[1:, :, 3:], part)
