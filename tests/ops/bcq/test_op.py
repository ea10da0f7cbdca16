"""The bcq ops: the reference twin on every machine, every kernel against fp64 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS, BcqTensors
from quantkit.ops.bcq.candidates import candidates
from quantkit.ops.bcq.op import bcq_dequantize, bcq_linear, bcq_linear_prepared
from quantkit.ops.bcq.order import GRID_PLANES, Order
from tests.ops.bcq.cases import (
    BINARY,
    DEQUANTIZE,
    GEMM,
    GEMM_MMA,
    INT8,
    KERNELS,
    LUT,
    BcqWeight,
    linear_arguments,
    prepared_arguments,
    random_weight,
)

CUDA = torch.device("cuda")
HOPPER, BLACKWELL = ARCHITECTURES[9, 0], ARCHITECTURES[12, 0]
# Relative error of the whole output, in norm: rounding of x's type on output (2^-11 and 2^-8), with slack for the
# fixed-point planes (a few 2^-16) and, for dequantize, the weight rounded to x's type.
RTOL = {torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2, torch.float32: 2e-5}
OUTLIER_RTOL = 4e-3  # one element 1000 times the rest: the rest keeps 5 to 6 bits, the norm of y hides it
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]
SHAPES = [  # N, K, group size
    (16, 256, 128),
    (576, 576, 128),  # short last group
    (1000, 1536, 64),
    (257, 1000, 32),  # neither a multiple of the tile
    (1536, 3072, 256),
    (130, 2304, -1),
    (96, 777, 96),  # rows of x not 16-byte aligned
    (40, 500, 24),  # groups of no whole word
    (200, 4096, 384),
    (64, 20480, 128),
    (50, 24700, 128),  # long enough to be split within a cluster, into unequal parts
]


def usable(
    group_size: int,
    in_features: int = 576,
    *,
    dtype: torch.dtype = torch.float16,
    row: Architecture = HOPPER,
    bits: int = 4,
) -> tuple[Kernel, ...]:
    return candidates(dtype, row, weight_bits=bits, group_size=group_size, in_features=in_features)


KERNEL_SHAPES = [(*it, kernel) for it in SHAPES for kernel in usable(it[2], it[1])]
KERNEL_SHAPE_IDS = [f"{n}x{k}-g{g}-{kernel}" for n, k, g, kernel in KERNEL_SHAPES]


SANITIZED = pytest.mark.sanitize
TOKEN_SHAPES = [  # planes, N, K, group size
    pytest.param(1, 257, 1000, 32, marks=SANITIZED),
    pytest.param(3, 130, 777, 96, marks=SANITIZED),  # rows of x not 16-byte aligned
    (4, 80, 24700, 128),  # too long for shared memory with eight tokens: several passes
    (4, 272, 16640, 32),
    pytest.param(6, 320, 1280, 64, marks=SANITIZED),
    (7, 40, 1280, -1),
]


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double().cpu() - expected).norm() / expected.norm())


def reference(weight: BcqWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double().cpu() @ weight.dequantized().T
    return y if bias is None else y + bias.double().cpu()


def run(weight: BcqWeight, x: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    return bcq_linear_prepared(x, *prepared_arguments(weight.to(x.device).tiled(), bias, kernel))


def dequantize(weight: BcqWeight, dtype: torch.dtype) -> Tensor:
    tiles = weight.tiled()
    sizes = (weight.out_features, weight.in_features, weight.group_size)
    return bcq_dequantize(tiles.tiles, tiles.scale_tiles, *sizes, dtype, tiles.factor_tiles)


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_prepared_twin_equals_the_canonical_one(scale_bits: int) -> None:
    weight, x = random_weight(3, 40, 328, 64, offset=True, scale_bits=scale_bits), torch.randn(2, 3, 328)
    bias = torch.randn(40)
    canonical = bcq_linear(x, *linear_arguments(weight, bias))
    assert torch.equal(bcq_linear_prepared(x, *prepared_arguments(weight.tiled(), bias)), canonical)
    assert relative_error(canonical.reshape(6, 40), reference(weight, x.reshape(6, 328), bias)) < RTOL[torch.float32]


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_dequantize_twin_rebuilds_the_weight(scale_bits: int) -> None:
    weight = random_weight(2, 20, 300, 128, offset=True, scale_bits=scale_bits)
    assert torch.equal(dequantize(weight, torch.float32).double(), weight.dequantized())


def test_candidates_follow_type_group_size_and_gpu() -> None:
    assert usable(128) == usable(-1, 577) == usable(32, bits=8) == KERNELS
    assert usable(24, dtype=torch.bfloat16) == (LUT, DEQUANTIZE)
    assert usable(128, dtype=torch.float32) == (DEQUANTIZE,)
    assert usable(128, row=BLACKWELL) == usable(32, row=BLACKWELL) == (INT8, LUT, GEMM_MMA, DEQUANTIZE)


def test_the_fused_product_is_left_out_where_shared_memory_has_no_room() -> None:
    assert usable(32, row=BLACKWELL, bits=8) == (INT8, LUT, DEQUANTIZE)


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "k", "group_size", "kernel"), KERNEL_SHAPES, ids=KERNEL_SHAPE_IDS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8], ids="q{}".format)
def test_kernel_matches_fp64(bits: int, n: int, k: int, group_size: int, kernel: str) -> None:
    cases = [
        (1, True, torch.float16, 16),
        (1, False, torch.float16, 16),
        (2, False, torch.bfloat16, 16),
        (7, True, torch.float16, 16),
        (1, True, torch.float16, 8),
        (3, False, torch.bfloat16, 8),
    ]
    for tokens, offset, dtype, scale_bits in cases:
        weight = random_weight(bits, n, k, group_size, offset=offset, scale_bits=scale_bits)
        x = torch.randn(tokens, k, device=CUDA).to(dtype)
        bias = torch.randn(n, device=CUDA).to(dtype) if offset else None
        y = run(weight, x, bias, kernel)
        assert y.dtype == dtype
        error = relative_error(y, reference(weight, x, bias))
        assert error < RTOL[dtype], f"{tokens=} {offset=} {dtype=} {scale_bits=} {error:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [BINARY, INT8])
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), TOKEN_SHAPES)
def test_kernel_at_every_token_count(bits: int, n: int, k: int, group_size: int, kernel: str) -> None:
    weight = random_weight(bits, n, k, group_size, offset=True)
    for tokens in (*range(1, 10), 17):
        x = torch.randn(tokens, k, device=CUDA).half()
        error = relative_error(run(weight, x, None, kernel), reference(weight, x, None))
        assert error < RTOL[torch.float16], f"{tokens=} {error:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_largest_codes_fit_into_two_bytes(dtype: torch.dtype) -> None:
    """The largest elements just below a power of two, where 256 hi + lo would need hi = 128."""
    weight = random_weight(2, 64, 512, 128, offset=False)
    below_two = torch.linspace(1.97, 2.0 - torch.finfo(dtype).eps, 512, device=CUDA)
    x = torch.stack([below_two, -below_two, below_two * 2.0**-9, torch.full_like(below_two, float(below_two[-1]))])
    x = x.to(dtype)
    errors = run(weight, x, None, INT8).double().cpu() - reference(weight, x, None)
    assert (errors.norm(dim=1) < RTOL[dtype] * reference(weight, x, None).norm(dim=1)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [BINARY, INT8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_two_tokens_do_not_disturb_each_other(group_size: int, kernel: str) -> None:
    weight, x = random_weight(3, 96, 1024, group_size, offset=True), torch.randn(2, 1024, device=CUDA).half()
    before = run(weight, x, None, kernel)
    x[1, 700] = float("nan")
    y = run(weight, x, None, kernel)
    assert torch.equal(y[0], before[0])
    assert y[1].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_tokens_do_not_disturb_each_other(group_size: int) -> None:
    weight, x = random_weight(3, 96, 1024, group_size, offset=True), torch.randn(8, 1024, device=CUDA).half()
    before = run(weight, x, None, INT8)
    x[2, 700], x[5, 3], x[6] = float("nan"), float("inf"), 0
    y = run(weight, x, None, INT8)
    others = [0, 1, 3, 4, 7]
    assert torch.equal(y[others], before[others])
    assert not y[[2, 5]].isfinite().any()
    assert not y[6].any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32], ids=[*TYPE_IDS, "fp32"])
def test_dequantize_kernel_is_exact_up_to_its_type(dtype: torch.dtype) -> None:
    weight = random_weight(5, 100, 523, 40, offset=True)
    got = dequantize(weight.to(CUDA), dtype).cpu()
    torch.testing.assert_close(got, weight.dequantized().float().to(dtype), rtol=RTOL[dtype], atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("order", [Order.CODES, Order.GRID])
@pytest.mark.parametrize("bits", GRID_PLANES)
def test_dequantize_kernel_reads_the_orders_for_batches(bits: int, order: Order) -> None:
    weight = random_weight(bits, 100, 1023, 96, offset=True, equal_steps=True)
    tiles = weight.to(CUDA).tiled(order)
    sizes = (weight.out_features, weight.in_features, weight.group_size)
    got = bcq_dequantize(tiles.tiles, tiles.scale_tiles, *sizes, torch.float32, None, order.value).cpu()
    torch.testing.assert_close(got, weight.dequantized().float(), rtol=RTOL[torch.float32], atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
@pytest.mark.parametrize("bits", [1, 4, 8], ids="q{}".format)
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32], ids=[*TYPE_IDS, "fp32"])
def test_coded_scales_dequantize_to_the_cpus_bits(dtype: torch.dtype, bits: int, offset: bool) -> None:
    weight = random_weight(bits, 100, 523, 40, offset=offset, scale_bits=8)
    assert torch.equal(dequantize(weight.to(CUDA), dtype).cpu(), dequantize(weight, dtype))


@pytest.mark.cuda
def test_coded_scales_at_the_ends_of_their_range() -> None:
    weight = random_weight(4, 64, 512, 64, offset=True, scale_bits=8)
    stored = weight.stored
    assert stored.offset is not None
    stored.scales[0], stored.offset[:32], stored.offset[32:] = 255, -128, 127
    stored.scale_factors[::3], stored.scale_factors[1::3] = 2.0**-24, 0.0  # fp16's smallest number; a row of zeros
    x = torch.randn(1, 512, device=CUDA).half() * 100
    assert torch.equal(dequantize(weight.to(CUDA), torch.float32).cpu(), dequantize(weight, torch.float32))
    for kernel in KERNELS:
        y = run(weight, x, None, kernel)
        assert not y[0, 1::3].any()
        assert relative_error(y[:, 2::3], reference(weight, x, None)[:, 2::3]) < RTOL[torch.float16]


@pytest.mark.cuda
def test_fp32_activations_keep_fp32_accuracy_and_the_canonical_op_agrees() -> None:
    weight = random_weight(4, 160, 1024, 128, offset=True)
    x = torch.randn(3, 1024, device=CUDA)
    there = weight.to(CUDA)
    y = bcq_linear(x, *linear_arguments(there, None))
    assert relative_error(y, reference(weight, x, None)) < RTOL[torch.float32]


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [BINARY, INT8, LUT, GEMM])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_unusual_activations(dtype: torch.dtype, group_size: int, kernel: str) -> None:
    weight = random_weight(3, 96, 1024, group_size, offset=True)
    zeros = torch.zeros(1, 1024, device=CUDA, dtype=dtype)
    assert not run(weight, zeros, None, kernel).any()
    outlier = torch.randn(1, 1024, device=CUDA).to(dtype)
    outlier[0, 300] = 1000.0
    error = relative_error(run(weight, outlier, None, kernel), reference(weight, outlier, None))
    assert error < max(OUTLIER_RTOL, RTOL[dtype])
    denormal = (torch.randn(1, 1024, device=CUDA) * 3e-6).to(dtype)  # below fp16's smallest normal number, 6e-5
    scaled = random_weight(3, 96, 1024, group_size, offset=False)
    big = BcqWeight(BcqTensors(scaled.stored.signs, scaled.stored.scales * 1000), group_size, 1024)
    assert relative_error(run(big, denormal, None, kernel), reference(big, denormal, None)) < 4 * RTOL[dtype]
    for poison in (float("inf"), float("nan")):
        poisoned = torch.randn(1, 1024, device=CUDA).to(dtype)
        poisoned[0, 700] = poison
        assert not run(weight, poisoned, None, kernel).isfinite().any()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("bits", "tokens", "group_size"), [(1, 1, 32), (1, 1, 128), (4, 1, 64), (4, 2, 128)])
def test_results_repeat_bit_for_bit(bits: int, tokens: int, group_size: int, kernel: str) -> None:
    weight = random_weight(bits, 1040, 4096, group_size, offset=True)
    x = torch.randn(tokens, 4096, device=CUDA).half()
    first = run(weight, x, None, kernel)
    assert all(torch.equal(run(weight, x, None, kernel), first) for _ in range(10))


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_capture_replays_on_new_inputs(kernel: str) -> None:
    weight = random_weight(2, 512, 1024, 128, offset=True).to(CUDA)
    arguments = prepared_arguments(weight.tiled(), None, kernel)
    x = torch.randn(1, 1024, device=CUDA).half()
    bcq_linear_prepared(x, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bcq_linear_prepared(x, *arguments)
    x.copy_(torch.randn(1, 1024))
    graph.replay()
    assert relative_error(y, reference(weight.to(torch.device("cpu")), x, None)) < RTOL[torch.float16]


@pytest.mark.cuda
def test_first_use_inside_a_capture_is_refused() -> None:
    weight = random_weight(7, 32, 256, 64, offset=True).to(CUDA)
    arguments = prepared_arguments(weight.tiled(), None, LUT)
    x = torch.randn(1, 256, device=CUDA).half()
    torch.cuda.synchronize()
    with pytest.raises(KernelError, match="run the model once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        bcq_linear_prepared(x, *arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS)
def test_non_default_stream_is_respected(kernel: str) -> None:
    weight = random_weight(3, 512, 2048, 128, offset=True)
    arguments = prepared_arguments(weight.to(CUDA).tiled(), None, kernel)
    source = torch.randn(1, 2048, device=CUDA).half()
    run(weight, source, None, kernel)
    stream, x = torch.cuda.Stream(), torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would read the zeros
        x.copy_(source)
        y = bcq_linear_prepared(x, *arguments)
    stream.synchronize()
    assert relative_error(y, reference(weight, source, None)) < RTOL[torch.float16]


@pytest.mark.cuda
def test_compiles_into_one_graph() -> None:
    weight = random_weight(4, 256, 512, 128, offset=True)
    arguments = prepared_arguments(weight.to(CUDA).tiled(), None)
    x = torch.randn(2, 512, device=CUDA).half()

    def block(x: Tensor) -> Tensor:
        return bcq_linear_prepared(x + 1, *arguments).relu()

    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x))


@pytest.mark.cuda
def test_every_gpu_present_computes_the_same() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU on this machine")
    weight, x = random_weight(4, 256, 512, 128, offset=True), torch.randn(1, 512).half()
    results = [run(weight, x.to(f"cuda:{i}"), None, BINARY).cpu() for i in range(2)]
    assert torch.equal(results[0], results[1])


@pytest.mark.cuda
def test_unusable_kernel_is_refused() -> None:
    weight = random_weight(2, 32, 240, 24, offset=False)
    with pytest.raises(KernelError, match=r"group size 24; choose bcq_lut_gemv, bcq_dequantize"):
        run(weight, torch.randn(1, 240, device=CUDA).half(), None, INT8)
