"""Products with a scale per row and group: the order of scales, the signed values, and every kernel on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Kernel
from quantkit.cuda.device import gpu_of
from quantkit.formats.bipolar import ActCoding, BipolarSpec, act_values, codes_to_values
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.fused import (
    FusedTile,
    fused_layouts,
    fused_tiles,
    plan_fused,
)
from quantkit.ops.bipolar.grouped import grouped_weight, takes_groups
from quantkit.ops.bipolar.instances import GROUPED_BITS
from quantkit.ops.bipolar.launch import gemv_grouped_launch, quantize_tiles
from quantkit.ops.bipolar.layout import plane_group_sums, tile_scales, untile_scales
from quantkit.ops.bipolar.op import (
    BipolarGroupedLinear,
    bipolar_grouped_linear,
    bipolar_grouped_linear_reference,
    bipolar_linear,
)
from quantkit.ops.bipolar.plan import grouped_kernel_for
from quantkit.ops.bipolar.product import Product
from tests.ops.bipolar.problem import hopper_only, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LINE, LINES, BLOCK = 128, 8, 64
TILES = [
    pytest.param(
        tile,
        id=f"w{bits}-{tile.tokens}-{tile.warpgroups}",
        marks=pytest.mark.sanitize if (bits, tile.tokens) in ((4, 32), (4, 128), (7, 64)) else (),
    )
    for bits in range(1, GROUPED_BITS + 1)
    for tile in fused_tiles(bits, grouped=True)
]
SHAPES = [(1, 5, 264), (7, 65, 1160), (65, 130, 392), (130, 257, 2184), (300, 520, 4096)]
SUMS_RTOL = 1e-5
"""Of the largest result: fp32 sums over at most 32 lines, in an order of the launch's."""
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Relative, of one rounding to the type of y."""


class GroupedProblem:
    """Seeded operands, groups of 128 or 256 columns, and their product in fp64 of int64 sums."""

    def __init__(self, shape: tuple[int, int, int], bits: tuple[int, int], dtype: torch.dtype, *, zero: bool):
        weight_bits, act_bits = bits
        m, n, self.in_features = shape
        self.group_size = LINE * (1 + (weight_bits + m) % 2)
        self.coding = ActCoding(act_bits, True, zero, zero)
        self.x = torch.randn(m, self.in_features).to(dtype)
        self.codes = torch.randint(0, 1 << weight_bits, (n, self.in_features), dtype=torch.uint8)
        self.planes, self.clip = pack_codes(self.codes, weight_bits), torch.tensor([0.8])
        self.scales = (torch.rand(n, -(-self.in_features // self.group_size)) * 0.01 + 0.001).half()
        self.bias = torch.randn(n).to(dtype)

    def sums(self) -> tuple[Tensor, Tensor]:
        """The integer sum [G, M, N] of every group, int64, and the step [M, 1] of x."""
        values, step = act_values(self.x, self.clip, self.coding)
        weight = codes_to_values(self.codes, len(self.planes)).long()
        pairs = zip(values.long().split(self.group_size, 1), weight.split(self.group_size, 1), strict=True)
        return torch.stack([x @ w.T for x, w in pairs]), step

    def expected(self) -> Tensor:
        """y in fp64."""
        sums, step = self.sums()
        return (sums.double() * self.scales.T[:, None].double()).sum(0) * step.double() + self.bias.double()

    def product(self, *, as_bytes: bool = True) -> Product:
        """Operands on the GPU, with room for y that is poisoned. as_bytes: x is in bytes, else in planes."""
        weight = grouped_weight(self.planes.cuda(), self.scales.cuda(), self.group_size, self.in_features)
        acts = quantize_tiles(self.x.cuda(), self.clip.cuda(), self.coding, as_bytes=as_bytes)
        bits = self.coding.bits, len(self.planes)
        y = torch.full((len(self.x), self.planes.shape[1]), float("nan"), dtype=self.x.dtype, device="cuda")
        return Product(acts, weight, self.bias.cuda(), y, self.in_features, bits, self.coding.zero)

    def check(self, y: Tensor) -> None:
        """Raise AssertionError where y is further from the product than sums in fp32 and one rounding explain."""
        expected = self.expected()
        atol = SUMS_RTOL * expected.abs().max().item()
        torch.testing.assert_close(y.double().cpu(), expected, rtol=ROUNDING[self.x.dtype], atol=atol)


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_and_layout_gives_the_product_and_repeats_its_bits(tile: FusedTile) -> None:
    hopper_only()
    for i, shape in enumerate(SHAPES):
        dtype = (torch.float16, torch.bfloat16, torch.float32)[i % 3]
        problem = GroupedProblem(shape, (tile.weight_bits, 8), dtype, zero=i % 2 == 1)
        product = problem.product()
        for plan in fused_layouts(tile, shape, gpu_of(CUDA).processors):
            y = run(product, plan)
            problem.check(y)
            assert torch.equal(y, run(product, plan)), f"{plan=}"


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
def test_sums_of_lines_are_exact(tile: FusedTile) -> None:
    """With scales of 1 and 2 every sum in fp32 is an integer below 2**24, so y is that of int64, rounded once."""
    hopper_only()
    problem = GroupedProblem((70, 130, 1160), (tile.weight_bits, 8), torch.float32, zero=True)
    problem.scales = torch.randint(1, 3, problem.scales.shape).half()
    sums, step = problem.sums()
    whole = (sums * problem.scales.T[:, None].long()).sum(0)
    assert whole.abs().max() < 1 << 24
    exact = (whole.double() * step.double() + problem.bias.double()).float()
    for plan in fused_layouts(tile, (70, 130, 1160), gpu_of(CUDA).processors):
        assert torch.equal(run(problem.product(), plan).cpu(), exact), f"{plan=}"


@pytest.mark.cuda
def test_blocks_of_several_items_give_the_product() -> None:
    """Whole items in rounds, then shared ones."""
    hopper_only()
    shape = (700, 6104, 2096)
    problem = GroupedProblem(shape, (4, 8), torch.float16, zero=True)
    product = problem.product()
    for tile in fused_tiles(4, grouped=True):
        for plan in fused_layouts(tile, shape, gpu_of(CUDA).processors):
            problem.check(run(product, plan))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("weight_bits", range(1, GROUPED_BITS + 1), ids="w{}".format)
@pytest.mark.parametrize(("tokens", "act_bits"), [(1, 8), (2, 8), (3, 5), (5, 2), (7, 1), (4, 4)], ids=str)
def test_the_gemv_gives_the_product_and_repeats_its_bits(tokens: int, act_bits: int, weight_bits: int) -> None:
    hopper_only()
    for i, (out_features, in_features) in enumerate([(5, 264), (77, 1160), (130, 2184)]):
        dtype = (torch.float16, torch.bfloat16, torch.float32)[i]
        problem = GroupedProblem((tokens, out_features, in_features), (weight_bits, act_bits), dtype, zero=i != 1)
        product = problem.product(as_bytes=False)
        for _ in range(2):
            product.y.fill_(float("nan"))
            gemv_grouped_launch(product).run()
            problem.check(product.y)
        first = product.y.clone()
        gemv_grouped_launch(product).run()
        assert torch.equal(product.y, first)


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero"])
@pytest.mark.parametrize("group_size", [128, 384])
@pytest.mark.parametrize("tokens", [1, 9], ids="M{}".format)
def test_the_op_is_the_canonical_product(tokens: int, group_size: int, zero: bool, device: torch.device) -> None:
    if device.type == "cuda":
        hopper_only()
    x, clip = torch.randn(tokens, 1032), torch.tensor([0.9])
    planes = pack_codes(torch.randint(0, 16, (70, 1032), dtype=torch.uint8), 4)
    scales, bias = (torch.rand(70, -(-1032 // group_size)) * 0.01).half(), torch.randn(70)
    expected = bipolar_linear(x, planes, scales, clip, bias, 8, group_size, True, zero, zero)
    weight = grouped_weight(planes, scales, group_size, 1032)
    tensors = (each.to(device) for each in (x, weight.tiles, weight.scale_tiles, weight.offsets, clip, bias))
    y = bipolar_grouped_linear(*tensors, 8, True, zero, zero).cpu()
    torch.testing.assert_close(y, expected, rtol=SUMS_RTOL, atol=SUMS_RTOL * expected.abs().max().item())


def test_the_reference_needs_no_offsets() -> None:
    """They follow from the other tensors: the kernel's short cut, not a part of the weight."""
    planes = pack_codes(torch.randint(0, 8, (5, 300), dtype=torch.uint8), 3)
    weight = grouped_weight(planes, torch.ones(5, 3).half(), LINE, 300)
    op = BipolarGroupedLinear(
        torch.randn(2, 300), weight.tiles, weight.scale_tiles, weight.offsets, torch.ones(1), None, 4, True
    )
    poisoned = op._replace(offsets=torch.full_like(weight.offsets, float("nan")))
    assert torch.equal(bipolar_grouped_linear_reference(op), bipolar_grouped_linear_reference(poisoned))


@pytest.mark.parametrize("shape", [(1, 264), (65, 1160), (130, 2048)], ids=str)
@pytest.mark.parametrize("group_size", [128, 256, 640])
def test_scales_stand_where_the_kernel_reads_them(group_size: int, shape: tuple[int, int]) -> None:
    count, in_features = shape
    scales = torch.randn(count, -(-in_features // group_size)).half()
    tiles = tile_scales(scales, group_size, in_features)
    assert tiles.shape == (-(-count // BLOCK), -(-in_features // 1024), LINES, BLOCK)
    for n in {0, count // 2, count - 1}:
        row = (n % 32 // 8) * 2 + (n % 8 // 2) * 8 + n % 2 + n % 64 // 32 * 32  # n % 64 == featureOfRow(row)
        for line in {0, -(-in_features // LINE) - 1}:
            warp, half, g = row // 16, row % 16 // 8, row % 8
            found = tiles[n // BLOCK, line // LINES, line % LINES, 16 * warp + 2 * g + half]
            assert found == scales[n, line * LINE // group_size]
    assert torch.equal(untile_scales(tiles, count, group_size, in_features), scales)


@pytest.mark.parametrize("bits", range(1, GROUPED_BITS + 1))
def test_signed_bytes_are_values_of_codes(bits: int) -> None:
    """SignedCodeWords: a code in the top bits, its first bit inverted, a one behind its last."""
    codes = torch.arange(1 << bits)
    byte = ((codes << (8 - bits)) ^ (0x80 | 1 << (7 - bits))).to(torch.uint8).view(torch.int8)
    assert torch.equal(byte.int(), codes_to_values(codes, bits).int() << (7 - bits))


def test_group_sums_are_sums_of_codes() -> None:
    codes = torch.randint(0, 32, (9, 300), dtype=torch.uint8)
    expected = torch.stack([part.sum(1, dtype=torch.int32) for part in codes.split(LINE, 1)], 1)
    assert torch.equal(plane_group_sums(pack_codes(codes, 5), 300, LINE), expected)


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (BipolarSpec(4, 8, 128), True),
        (BipolarSpec(7, 1, 256), True),
        (BipolarSpec(8, 8, 128), False),  # a signed value takes nine bits
        (BipolarSpec(4, 8, 64), False),  # a line has two scales
        (BipolarSpec(4, 16, 128), False),
        (BipolarSpec(4, 8), False),
        (BipolarSpec(4, 8, 4096), False),  # one group
    ],
    ids=str,
)
def test_which_weights_the_kernel_takes(spec: BipolarSpec, taken: bool) -> None:
    assert takes_groups(spec, 4096, CPU) is taken


@pytest.mark.parametrize("weight_bits", range(1, GROUPED_BITS + 1))
def test_items_of_groups_have_room_for_both_sums(weight_bits: int) -> None:
    for tile in fused_tiles(weight_bits, grouped=True):
        assert tile.tokens <= 128
        assert tile.slots > tile.warpgroups
        assert tile.stages >= 2
    assert plan_fused(weight_bits, (1, 4096, 4096), 132, grouped=True).tile.tokens == 32


def test_only_hopper_has_the_kernel() -> None:
    for kernel in (Kernel.BIPOLAR_GROUPED_WGMMA, Kernel.BIPOLAR_GROUPED_GEMV):
        assert [row.capability for row in ARCHITECTURES.values() if kernel in row.kernels] == [(9, 0)]


def test_few_pairs_of_token_and_plane_take_the_gemv() -> None:
    assert grouped_kernel_for(8, 2) is grouped_kernel_for(1, 16) is Kernel.BIPOLAR_GROUPED_GEMV
    assert grouped_kernel_for(8, 3) is grouped_kernel_for(1, 17) is Kernel.BIPOLAR_GROUPED_WGMMA
