"""The ops ``quantkit::bcq_linear`` (canonical tensors) and ``quantkit::bcq_linear_prepared`` (tile order).

On the CPU both run the reference twin. On a GPU both run the kernels; the canonical op then builds the tile order on
every call, which is right but slow: modules prepare once at load. ``bcq_dequantize`` gives the weight itself;
``bcq_experts`` multiplies each token by the experts that it chose.
fp16 and bf16 activations use the GEMV kernels; fp32 ones an fp32 weight and cuBLAS, so nothing is rounded.
Factors come with 8-bit scales and are None with fp16 ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product as pairs
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.cuda.architectures import Kernel
from quantkit.cuda.device import gpu_of
from quantkit.formats.bcq import ROW_WISE, BcqTensors, dequantize_stored, group_count
from quantkit.formats.planes import pack_bits
from quantkit.ops.bcq.arranged import InputOrder
from quantkit.ops.bcq.autotune import choose
from quantkit.ops.bcq.bound import bound_product, input_order
from quantkit.ops.bcq.candidates import OF_PLANES
from quantkit.ops.bcq.experts import ExpertsKernel, ExpertsProduct, choose_experts_kernel, experts_product
from quantkit.ops.bcq.launch import dequantize_tiles, product
from quantkit.ops.bcq.layout import BcqTiles, join_experts, split_experts, tile, untile
from quantkit.ops.bcq.order import GRID_PLANES, Order
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from quantkit.ops.registry import define_op

AUTO = "auto"


class BcqLinear(NamedTuple):
    """y [..., N] = x [..., K] W^T + bias of canonical tensors (quantkit.formats.bcq)."""

    x: Tensor
    signs: Tensor
    scales: Tensor
    offset: Tensor | None
    bias: Tensor | None
    group_size: int
    scale_factors: Tensor | None = None

    @property
    def stored(self) -> BcqTensors:
        """The weight."""
        return BcqTensors(self.signs, self.scales, self.offset, self.scale_factors)


class BcqLinearPrepared(NamedTuple):
    """BcqLinear of a prepared weight (layout.py).

    implementation: a kernel by name, or the measured choice. weights_ready: no kernel still queued writes the weight.
    order: of the weight (Order).
    """

    x: Tensor
    tiles: Tensor
    scale_tiles: Tensor
    bias: Tensor | None
    out_features: int
    group_size: int
    implementation: str = AUTO
    weights_ready: bool = False
    factor_tiles: Tensor | None = None
    order: str = Order.PLANES.value

    @property
    def weight(self) -> BcqTiles:
        """The weight."""
        shape = self.out_features, self.x.shape[-1]
        return BcqTiles(self.tiles, self.scale_tiles, self.factor_tiles, *shape, self.group_size, Order(self.order))


class BcqDequantize(NamedTuple):
    """The weight [N, K] in ``dtype``."""

    tiles: Tensor
    scale_tiles: Tensor
    out_features: int
    in_features: int
    group_size: int
    dtype: torch.dtype
    factor_tiles: Tensor | None = None
    order: str = Order.PLANES.value

    @property
    def weight(self) -> BcqTiles:
        """The weight."""
        shape = self.out_features, self.in_features
        return BcqTiles(self.tiles, self.scale_tiles, self.factor_tiles, *shape, self.group_size, Order(self.order))


class BcqExperts(NamedTuple):
    """y [pairs, N] = x[p // choices] W_e^T + bias[e] for every pair p of a token and an expert e = chosen[p].

    x: [tokens, K], choices = pairs / tokens. chosen: [pairs] integers; one that is no expert gives zeros. tiles,
    scale_tiles, factor_tiles: of the prepared weights of all experts, one after the other. bias: [experts, N].
    implementation: see choose_experts_kernel for what AUTO takes.
    """

    x: Tensor
    chosen: Tensor
    tiles: Tensor
    scale_tiles: Tensor
    bias: Tensor | None
    out_features: int
    group_size: int
    implementation: str = AUTO
    factor_tiles: Tensor | None = None

    @property
    def weight(self) -> BcqTiles:
        """The weights."""
        shape = self.out_features, self.x.shape[-1]
        return BcqTiles(self.tiles, self.scale_tiles, self.factor_tiles, *shape, self.group_size)

    @property
    def product(self) -> ExpertsProduct:
        """What the kernels take, with room for y."""
        x, bias = self.x.contiguous(), None if self.bias is None else self.bias.to(self.x.dtype).contiguous()
        y = x.new_empty(self.chosen.numel(), self.out_features)
        return ExpertsProduct(x, self.weight, bias, self.chosen.long().contiguous(), y)


def bcq_linear_reference(x: Tensor, stored: BcqTensors, bias: Tensor | None, group_size: int) -> Tensor:
    """y = x W^T + bias, W rebuilt from its planes in fp32 and rounded to x's dtype (nuQmm section 5.1)."""
    weight = dequantize_stored(stored, x.shape[-1], group_size)
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _product(
    x: Tensor,
    weight: BcqTiles,
    bias: Tensor | None,
    implementation: str = AUTO,
    *,
    weights_ready: bool,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], epilogue.width(weight.out_features))
    if implementation == AUTO:
        sizes = weight.weight_bits, weight.out_features, weight.group_size, weight.scale_bits
        implementation = choose(flat, *sizes, order=weight.order)
    y = product(implementation, flat, weight, bias, weights_ready=weights_ready, epilogue=epilogue)
    return y.view(*x.shape[:-1], y.shape[-1])


def bcq_linear_with_epilogue(op: BcqLinearPrepared, epilogue: Epilogue) -> Tensor:
    """The epilogue of the op's result, in the product's own kernel, by the measured choice.

    Not a call of the op, which would take the host longer: for generation, where nothing traces it.
    """
    x = op.x
    if not x.is_cuda:
        return apply_epilogue(bcq_linear_reference(x, untile(op.weight), op.bias, op.group_size), epilogue)
    return with_epilogue_cuda(op, epilogue)


def with_epilogue_cuda(op: BcqLinearPrepared, epilogue: Epilogue) -> Tensor:
    """The same of tensors on a GPU, by the op's implementation."""
    y = bound_product(op, epilogue) if op.implementation == AUTO else None
    if y is not None:
        return y
    weights_ready = op.weights_ready
    return _product(op.x, op.weight, op.bias, op.implementation, weights_ready=weights_ready, epilogue=epilogue)


def bcq_input_order(op: BcqLinearPrepared, epilogue: Epilogue) -> InputOrder | None:
    """The order in which the product with an epilogue also takes what is like op.x, or None; see bound.input_order."""
    return input_order(op, epilogue) if op.x.is_cuda else None


def _linear_cuda(op: BcqLinear) -> Tensor:
    return _product(op.x, tile(op.stored, op.x.shape[-1], op.group_size), op.bias, weights_ready=False)


def _dequantize_reference(op: BcqDequantize) -> Tensor:
    return dequantize_stored(untile(op.weight), op.in_features, op.group_size).to(op.dtype)


def _experts_cuda(op: BcqExperts) -> Tensor:
    product = op.product
    if op.implementation == AUTO:
        row = gpu_of(op.x.device).architecture
        return experts_product(choose_experts_kernel(product.pairs, product.experts, row), product)
    return experts_product(ExpertsKernel(op.implementation), product)


def _experts_reference(op: BcqExperts) -> Tensor:
    product = op.product
    product.y.zero_()
    if product.pairs:
        rows = op.x.repeat_interleave(product.choices, dim=0)
        for expert, weight in enumerate(split_experts(op.weight)):
            own = (op.chosen == expert).nonzero()[:, 0]
            bias = None if op.bias is None else op.bias[expert]
            product.y[own] = bcq_linear_reference(rows[own], untile(weight), bias, op.group_size)
    return product.y


# N, K, group size; the last is split among the blocks of a cluster where there are clusters
_SAMPLE_SHAPES = ((40, 328, 64), (257, 1000, 128), (50, 520, 40), (20, 100, ROW_WISE), (50, 24700, 128))


def linear_samples(shapes: Sequence[tuple[int, int, int]] = _SAMPLE_SHAPES) -> Iterator[BcqLinear]:
    """Every kernel takes some: tokens for each GEMV, groups of whole words and of bytes, both kinds of scales."""
    for bits, ((n, k, group_size), tokens) in enumerate(pairs(shapes, (1, 2, 5, 20))):
        groups, weight_bits = group_count(group_size, k), bits % 4 + 1
        signs, x = pack_bits(torch.randint(0, 2, (weight_bits, n, k))), torch.randn(tokens, k).half()
        scales, offset = (torch.rand(weight_bits, n, groups) * 0.02).half(), (torch.randn(n, groups) * 0.01).half()
        yield BcqLinear(x, signs, scales, offset, torch.randn(n).half(), group_size)
        coded, factors = torch.randint(0, 256, scales.shape).to(torch.uint8), (torch.rand(n, 1) * 8e-5).half()
        yield BcqLinear(x.bfloat16(), signs, coded, None, None, group_size, factors)
    yield BcqLinear(x.float(), signs, scales, None, None, group_size)


def batch_samples(op: BcqLinear) -> Iterator[BcqTiles]:
    """The weight in the orders for batches; that of a grid has the steps of plane 0."""
    yield tile(op.stored, op.x.shape[-1], op.group_size, order=Order.CODES)
    if len(op.scales) in GRID_PLANES and op.scale_factors is None:
        doubled = op.scales[:1] * 2.0 ** torch.arange(len(op.scales)).view(-1, 1, 1).half()
        yield tile(replace(op.stored, scales=doubled), op.x.shape[-1], op.group_size, order=Order.GRID)


def _prepared_samples() -> Iterator[BcqLinearPrepared]:
    for number, op in enumerate(linear_samples()):
        weight = tile(op.stored, op.x.shape[-1], op.group_size)
        stored = weight.tiles, weight.scale_tiles, op.bias, weight.out_features, op.group_size
        whole_words = op.group_size == ROW_WISE or op.group_size % 32 == 0
        short = whole_words and op.x.dtype != torch.float32
        names = (AUTO, *OF_PLANES) if short else (AUTO,)
        yield BcqLinearPrepared(op.x, *stored, str(names[number % len(names)]), False, weight.factor_tiles)
        if whole_words:
            name = str(Kernel.BCQ_LEVEL_GEMV) if short and number % 2 else AUTO
            for other in batch_samples(op):
                held = other.tiles, other.scale_tiles, *stored[2:]
                yield BcqLinearPrepared(op.x, *held, name, False, other.factor_tiles, other.order.value)


def _experts_samples() -> Iterator[BcqExperts]:
    """Experts of one token, of all and of none; a choice of no expert; products of one input and of one each."""
    for number, op in enumerate(linear_samples()):
        whole_words = op.group_size == ROW_WISE or op.group_size % 32 == 0
        if op.x.dtype == torch.float32 or not whole_words:
            continue
        one = tile(op.stored, op.x.shape[-1], op.group_size)
        weight = join_experts([one, tile(op.stored, op.x.shape[-1], op.group_size), one])
        choices = number % 2 + 1
        chosen = (
            (torch.arange(len(op.x) * choices) + 1).remainder(5) - 1 if number % 3 else torch.ones(len(op.x) * choices)
        )
        bias = None if op.bias is None else torch.stack([op.bias, op.bias * 2, -op.bias])
        stored = weight.tiles, weight.scale_tiles, bias, weight.out_features, op.group_size
        kernel = (*ExpertsKernel, AUTO)[number % 3]
        yield BcqExperts(op.x, chosen.long(), *stored, str(kernel), weight.factor_tiles)


def _dequantize_samples() -> Iterator[BcqDequantize]:
    for op, dtype in zip(linear_samples(), (torch.float16, torch.bfloat16, torch.float32) * 3, strict=False):
        for weight in (tile(op.stored, op.x.shape[-1], op.group_size), *batch_samples(op)):
            shape = weight.out_features, weight.in_features
            held = weight.tiles, weight.scale_tiles
            yield BcqDequantize(*held, *shape, op.group_size, dtype, weight.factor_tiles, weight.order.value)


bcq_linear = define_op(
    "bcq_linear",
    BcqLinear,
    reference=lambda op: bcq_linear_reference(op.x, op.stored, op.bias, op.group_size),
    cuda=_linear_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.signs.shape[1]),
    samples=linear_samples,
)
bcq_linear_prepared = define_op(
    "bcq_linear_prepared",
    BcqLinearPrepared,
    reference=lambda op: bcq_linear_reference(op.x, untile(op.weight), op.bias, op.group_size),
    cuda=lambda op: with_epilogue_cuda(op, NO_EPILOGUE),
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.out_features),
    samples=_prepared_samples,
)
bcq_dequantize = define_op(
    "bcq_dequantize",
    BcqDequantize,
    reference=_dequantize_reference,
    cuda=lambda op: dequantize_tiles(op.weight, op.dtype),
    fake=lambda op: op.tiles.new_empty(op.out_features, op.in_features, dtype=op.dtype),
    samples=_dequantize_samples,
)
bcq_experts = define_op(
    "bcq_experts",
    BcqExperts,
    reference=_experts_reference,
    cuda=_experts_cuda,
    fake=lambda op: op.x.new_empty(op.chosen.shape[0], op.out_features),
    samples=_experts_samples,
)
