"""The flatten and INT8 kernels against the reference twins: every path, tile, type and odd shape, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.errors import KernelError
from quantkit.formats.flatten import max_code, pack_nibbles, unpack_codes
from quantkit.ops.flatten.instances import GEMM_TILES, GemmTile
from quantkit.ops.flatten.launch import Product, expand, mma_launch, wgmma_launch
from quantkit.ops.flatten.layout import tile_codes, untile_codes
from quantkit.ops.flatten.op import (
    flatten_quantize,
    flatten_quantize_tiles,
    int8_gemm,
    int8_gemm_tiles,
    multiplier,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SANITIZED_DTYPES = [pytest.param(torch.float16, marks=pytest.mark.sanitize), *DTYPES[1:]]
SHAPES = [(1, 5, 32), (7, 65, 160), (65, 130, 96), (130, 257, 2080), (300, 520, 4096)]
ROW_SCALES = [False, True]
CUDA = torch.device("cuda")
HOPPER = (9, 0)
QUANTIZED = [  # K, K_ext
    pytest.param(20, 32, marks=pytest.mark.sanitize),
    pytest.param(999, 1280, marks=pytest.mark.sanitize),
    *((4096, 5120), (20480, 24896), (60001, 60032)),
]


def _map(k: int, extended: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A column map whose extended columns are random channels' slices 0 to 3."""
    extra = extended - k
    source_channel = torch.cat((torch.arange(k), torch.randint(0, k, (extra,)).sort().values))
    source_segment = torch.cat((torch.zeros(k, dtype=torch.long), torch.randint(0, 4, (extra,))))
    return source_channel.int().to(device), source_segment.int().to(device)


def _codes(rows: int, extended: int, bits: int) -> Tensor:
    top = max_code(bits)
    codes = torch.randint(-top, top + 1, (rows, extended), dtype=torch.int8)
    codes[0], codes[-1] = top, -top  # both ends of the range, all over a row
    return codes


def _stored(codes: Tensor, bits: int) -> Tensor:
    return pack_nibbles(codes) if bits == 4 else codes


class _Problem:
    """Seeded operands of y [M, N] and the reference's y; the largest sums come from the outer rows."""

    def __init__(
        self, shape: tuple[int, int, int], bits: int, dtype: torch.dtype, bias: bool = True, row_scales: bool = False
    ):
        m, n, extended = shape
        self.bits, self.dtype, self.shape = bits, dtype, shape
        self.acts, self.codes = _codes(m, extended, bits), _codes(n, extended, bits)
        per_row = torch.rand(n, 1) + 0.5 if row_scales else torch.ones(1)
        self.scales = torch.tensor([0.013]), 0.0021 * per_row
        self.bias = torch.randn(n).to(dtype) if bias else None

    def expected(self) -> Tensor:
        return int8_gemm(self.acts, self.codes, *self.scales, self.bias, self.dtype)

    def operands(self, packed_acts: bool = False) -> tuple[Tensor, Tensor]:
        acts = tile_codes(_stored(self.acts, 4 if packed_acts else 8).cuda())
        return acts, tile_codes(_stored(self.codes, self.bits).cuda(), weight=True)

    def rest(self) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        act_scale, weight_scale = self.scales
        return (act_scale.cuda(), weight_scale.cuda()), None if self.bias is None else self.bias.cuda()

    def product(self, packed_acts: bool = False) -> Product:
        """With room for y, poisoned: an element that is not written shows."""
        y = torch.full(self.shape[:2], float("nan"), dtype=self.dtype, device="cuda")
        return Product(*self.operands(packed_acts), *self.rest(), y)


@pytest.mark.parametrize("weight", [False, True], ids=["acts", "weight"])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_tiles_are_restored_bit_for_bit(device: torch.device, bits: int, weight: bool) -> None:
    stored = _stored(_codes(70, 160, bits), bits).to(device)
    tiles = tile_codes(stored, weight=weight)
    assert tiles.dtype == stored.dtype
    assert torch.equal(untile_codes(tiles, 70, 160, weight=weight), stored)


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize(("m", "n", "extended"), [(1, 5, 32), (7, 70, 160), (65, 33, 288)])
def test_tiled_ops_equal_the_plain_ones(device: torch.device, m: int, n: int, extended: int, bits: int) -> None:
    k = extended - 24
    x = torch.randn(m, k, device=device) * 40
    maps, act_scale = _map(k, extended, device), torch.tensor([0.21], device=device)
    acts = flatten_quantize_tiles(x, *maps, multiplier(act_scale, None), bits, False)
    plain = flatten_quantize(x, *maps, act_scale, None, bits)
    assert torch.equal(untile_codes(acts, m, extended), plain)
    codes = _codes(n, extended, bits)
    tiles, one = tile_codes(_stored(codes, bits).to(device), weight=True), torch.ones(1, device=device)
    y = int8_gemm_tiles(acts, tiles, one, one, None, m, n, torch.float32)
    assert torch.equal(y.cpu().long(), plain.cpu().long() @ codes.long().t())


def test_packed_activations_hold_the_same_codes() -> None:
    x, scale = torch.randn(9, 40) * 8, torch.tensor([0.5])
    maps = _map(40, 96, torch.device("cpu"))
    packed = flatten_quantize_tiles(x, *maps, multiplier(scale, None), 4, True)
    assert torch.equal(unpack_codes(untile_codes(packed, 9, 96)), flatten_quantize(x, *maps, scale, None, 4))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    one, codes = torch.ones(1, device=device), torch.ones(8, 32, dtype=torch.int8, device=device)
    maps = _map(32, 32, device)
    acts = flatten_quantize_tiles(torch.zeros(0, 32, device=device), *maps, one, 8, False)
    y = int8_gemm_tiles(acts, tile_codes(codes, weight=True), one, one, None, 0, 8, torch.float16)
    assert y.shape == (0, 8)
    assert flatten_quantize(torch.zeros(2, 0, 32, device=device), *maps, one, None, 8).shape == (2, 0, 32)


def test_a_launch_says_whether_every_feature_has_a_scale() -> None:
    codes, y = torch.ones(70, 160, dtype=torch.int8), torch.empty(70, 70)
    acts, tiles, one = tile_codes(codes), tile_codes(codes, weight=True), torch.ones(1)
    alike, per_row = (Product(acts, tiles, (one, scale), None, y) for scale in (one, torch.ones(70, 1)))
    for product, flag in ((alike, 0), (per_row, 1)):
        for launch in (mma_launch(product), *(wgmma_launch(product, tile, 132) for tile in GEMM_TILES)):
            launch.check()
            assert launch.args["rowScales"] == flag
            assert launch.args["weightScale"] is product.scales[1]
    assert alike.kind() != per_row.kind()  # a launch that is kept has the flag in it


@pytest.mark.cuda
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "extended"), QUANTIZED)
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_quantizer_gives_the_reference_codes(
    bits: int, k: int, extended: int, dtype: torch.dtype, smooth: bool
) -> None:
    x = (torch.randn(67, k) * torch.logspace(-1, 2, k)).to(dtype)
    x[3] = 0
    x[5, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -3e4])
    cpu = torch.device("cpu")
    maps, scale = _map(k, extended, cpu), torch.tensor([0.037])
    smooth_scale = torch.rand(k) + 0.3 if smooth else None
    expected = flatten_quantize(x, *maps, scale, smooth_scale, bits)
    on_gpu = [None if t is None else t.cuda() for t in (x, *maps, scale, smooth_scale)]
    assert torch.equal(flatten_quantize(*on_gpu, bits).cpu(), expected)
    factors = multiplier(scale, smooth_scale).cuda()
    for packed in {False, bits == 4}:
        tiles = flatten_quantize_tiles(*on_gpu[:3], factors, bits, packed)
        assert torch.equal(unpack_codes(untile_codes(tiles, 67, extended)).cpu(), expected)
        behind = untile_codes(tiles, 67, tiles.shape[1] * 128 * (2 if packed else 1))
        assert not unpack_codes(behind)[:, extended:].any()


@pytest.mark.cuda
@pytest.mark.sanitize
def test_quantizer_reads_rows_that_are_not_aligned() -> None:
    x = torch.randn(5 * 64 + 1, device="cuda").half()[1:].view(5, 64)
    maps, one = _map(64, 96, x.device), torch.tensor([0.02], device="cuda")
    channel, segment = (t.cpu() for t in maps)
    expected = flatten_quantize(x.cpu(), channel, segment, one.cpu(), None, 8)
    assert torch.equal(flatten_quantize(x, *maps, one, None, 8).cpu(), expected)


@pytest.mark.cuda
def test_types_that_no_kernel_reads_are_refused() -> None:
    x = torch.zeros(2, 32, device="cuda", dtype=torch.float64)
    with pytest.raises(KernelError, match="not float64"):
        flatten_quantize(x, *_map(32, 32, x.device), torch.ones(1, device="cuda"), None, 8)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("extended", [32, 160, 1056])
def test_expansion_gives_the_codes(extended: int) -> None:
    codes = _codes(70, extended, 4)
    tiles = expand(tile_codes(pack_nibbles(codes).cuda(), weight=True), -(-extended // 128))
    assert torch.equal(untile_codes(tiles, 70, extended, weight=True).cpu(), codes)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SANITIZED_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("row_scales", ROW_SCALES, ids=["one scale", "row scales"])
@pytest.mark.parametrize("tile", GEMM_TILES, ids=str)
def test_every_wgmma_tile_equals_the_reference(
    tile: GemmTile, row_scales: bool, bias: bool, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("warpgroup products need compute capability 9.0")
    for shape in [*SHAPES, (1000, 2056, 640)]:
        problem = _Problem(shape, 8, dtype, bias, row_scales)
        product = problem.product()
        wgmma_launch(product, tile, gpu_of(CUDA).processors).run()
        assert torch.equal(product.out.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_scales", ROW_SCALES, ids=["one scale", "row scales"])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_warp_products_equal_the_reference(bits: int, row_scales: bool, dtype: torch.dtype) -> None:
    # INT4 products are emulated on some GPUs, but exact everywhere.
    for shape in SHAPES:
        problem = _Problem(shape, bits, dtype, row_scales=row_scales)
        product = problem.product(packed_acts=bits == 4)
        mma_launch(product).run()
        assert torch.equal(product.out.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.parametrize("row_scales", ROW_SCALES, ids=["one scale", "row scales"])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=[f"{m}x{n}x{k}" for m, n, k in SHAPES])
def test_op_equals_the_reference(shape: tuple[int, int, int], bits: int, row_scales: bool) -> None:
    problem = _Problem(shape, bits, torch.float16, row_scales=row_scales)
    (act_scale, weight_scale), bias = problem.rest()
    y = int8_gemm_tiles(*problem.operands(), act_scale, weight_scale, bias, *shape[:2], torch.float16)
    assert torch.equal(y.cpu(), problem.expected())


@pytest.mark.cuda
def test_bias_of_another_type_and_alignment_is_read_as_it_is() -> None:
    problem = _Problem((65, 130, 96), 8, torch.float16, bias=False)
    problem.bias = torch.randn(131)[1:]
    scales, _ = problem.rest()
    bias = torch.cat((problem.bias[:1], problem.bias)).cuda()[1:]
    y = int8_gemm_tiles(*problem.operands(), *scales, bias, 65, 130, torch.float16)
    assert torch.equal(y.cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_two_runs_and_a_graph_give_the_same_bits(bits: int, tokens: int) -> None:
    x, codes = torch.randn(tokens, 1000, device="cuda").half(), _codes(520, 1280, bits)
    maps, scale = _map(1000, 1280, x.device), torch.tensor([0.03], device="cuda")
    tiles, factors = tile_codes(_stored(codes, bits).cuda(), weight=True), multiplier(scale, None)

    def run() -> Tensor:
        acts = flatten_quantize_tiles(x, *maps, factors, bits, False)
        return int8_gemm_tiles(acts, tiles, scale, scale, None, tokens, 520, torch.float16)

    first, second = run(), run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert torch.equal(first, captured)
