"""Products of prepared weights that come again and again: the host queues thousands for a prompt, faster than they run.

All that a launch is, but where x, y and the work memory are, follows from the weight's tensors and the number of
tokens. So what the driver reads of it is made once and kept; a later product puts its own addresses in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.cuda.architectures import Kernel
from quantkit.cuda.counts import zero_counts
from quantkit.cuda.device import gpu_of
from quantkit.cuda.driver import FixedLaunch
from quantkit.cuda.launch import MOST_FIXED, Launch, queue_fixed
from quantkit.cuda.tensor_map import TensorMap, encoded_map
from quantkit.errors import KernelError
from quantkit.ops.bcq.arranged import ArrangedInput, InputOrder
from quantkit.ops.bcq.autotune import choose, forgotten_with_the_table
from quantkit.ops.bcq.candidates import GATING
from quantkit.ops.bcq.gemm import FUSED, VECTOR_VALUES
from quantkit.ops.bcq.gemm_launch import gemm_input_order, gemm_launches, gemm_work
from quantkit.ops.bcq.launch import tensor_core_launch
from quantkit.ops.bcq.level_gemv import level_launch
from quantkit.ops.bcq.order import Order
from quantkit.ops.bcq.product import Product
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue

if TYPE_CHECKING:
    from quantkit.ops.bcq.op import BcqLinearPrepared

_VECTOR_BYTES = 16


@dataclass(frozen=True, eq=False)
class BoundProduct:
    """A product of one weight and a number of tokens, but for x, y, a residual and the work memory.

    arrange: puts x in the order of the products, at the beginning of the work memory; None where they take x as it is.
    order: that one, or None. width: of y.
    box: rows and columns of the boxes in which the kernel copies x, None where it takes a pointer. work_bytes: of x in
    order and of what blocks share. partials: where sums begin in the work memory. counts: 0 where blocks share nothing.
    """

    launch: FixedLaunch
    arrange: FixedLaunch | None
    order: InputOrder | None
    width: int
    box: tuple[int, int] | None
    work_bytes: int
    partials: int
    counts: int

    def run(self, x: Tensor, tokens: int, epilogue: Epilogue) -> Tensor:
        """The epilogue of y [..., N] of a contiguous x [..., K] of so many tokens."""
        address, encoded, work = x.data_ptr(), b"", 0
        if self.work_bytes:
            memory = torch.empty(self.work_bytes, dtype=torch.uint8, device=x.device)
            work = memory.data_ptr()
        if self.arrange is not None:
            queue_fixed(self.arrange, x.device, (address, work))
            address = work
        if self.box is not None:
            encoded = encoded_map(address, tokens, x.shape[-1], *self.box)
        return self._multiply(x, address, work, encoded, epilogue)

    def run_arranged(self, rows: ArrangedInput, epilogue: Epilogue) -> Tensor:
        """The same of rows in its order. Raises KernelError for another order."""
        if rows.order != self.order:
            raise KernelError(f"rows in the order {rows.order} cannot be multiplied by a product of {self.order}")
        work = rows.memory.data_ptr()
        return self._multiply(rows.like, work, work, b"", epilogue)

    def _multiply(self, like: Tensor, address: int, work: int, encoded: bytes, epilogue: Epilogue) -> Tensor:
        """y of x, which is at an address; like: of its shape, type and device."""
        y = like.new_empty(*like.shape[:-1], self.width)
        words = [y.data_ptr()]
        if self.box is None:
            words.append(address)
        if self.counts:
            words += (work + self.partials, zero_counts(self.counts, like.device).data_ptr())
        residual = epilogue.addend(y)
        if residual is not None:
            words.append(residual.data_ptr())
        queue_fixed(self.launch, like.device, words, encoded)
        return y


_products: dict[tuple[object, ...], BoundProduct | None] = {}


@forgotten_with_the_table
def forget_products() -> None:
    """Choose and plan every product again."""
    _products.clear()


def bound_product(op: BcqLinearPrepared, epilogue: Epilogue = NO_EPILOGUE) -> Tensor | None:
    """The epilogue of the op's result.

    None for what goes the usual way: look-ups, dequantized weights, x in need of a copy, gates of kernels without such.

    Raises KernelError as the usual way does.
    """
    x = op.x
    found = _found(op, epilogue) if x.is_contiguous() else None
    return None if found is None else found.run(x, x.numel() // x.shape[-1], epilogue)


def input_order(op: BcqLinearPrepared, epilogue: Epilogue) -> InputOrder | None:
    """The order in which the op's product reads x, for the kernel that writes x; None where it takes rows as they are.

    Of op.x shape, type and device count.
    """
    if Order(op.order).for_batches:
        return None
    found = _found(op, epilogue)
    return None if found is None else found.order


def arranged_product(op: BcqLinearPrepared, rows: ArrangedInput, epilogue: Epilogue) -> Tensor:
    """The epilogue of the op's result for rows in its ``input_order``; op.x is what they are like.

    Raises KernelError for rows in another order.
    """
    found = _found(op, epilogue)
    if found is None:
        raise KernelError(
            f"rows in the order {rows.order} cannot be multiplied by a product that reads them as they are"
        )
    return found.run_arranged(rows, epilogue)


def _found(op: BcqLinearPrepared, epilogue: Epilogue) -> BoundProduct | None:
    """The op's product, whatever the elements of x."""
    x, bias = op.x, op.bias
    columns = x.shape[-1]
    tokens = x.numel() // columns if columns else 0
    if not tokens or columns % VECTOR_VALUES or x.data_ptr() % _VECTOR_BYTES:
        return None
    if bias is not None and bias.dtype != x.dtype:
        return None
    pointers = op.tiles.data_ptr(), op.scale_tiles.data_ptr(), _address(bias), _address(op.factor_tiles)
    shapes = op.tiles.shape, op.scale_tiles.shape, op.out_features, op.group_size, op.order, op.weights_ready
    key = x.device, x.dtype, tokens, columns, *pointers, *shapes, epilogue.number, epilogue.residual is None
    if key not in _products:
        if len(_products) >= MOST_FIXED:
            forget_products()
        _products[key] = _bind(op, tokens, epilogue)
    return _products[key]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bind(op: BcqLinearPrepared, tokens: int, epilogue: Epilogue) -> BoundProduct | None:
    x, weight = op.x.new_empty(tokens, op.x.shape[-1]), op.weight  # where x is comes with every call
    sizes = weight.weight_bits, weight.out_features, weight.group_size, weight.scale_bits
    kernel, gpu = choose(x, *sizes, order=weight.order), gpu_of(x.device)
    if epilogue.gated and kernel not in GATING:
        return None
    product = Product.of(x, weight, op.bias, epilogue=epilogue, weights_ready=op.weights_ready)
    launches: tuple[Launch, ...] = ()
    order, work_bytes, partials, counts = None, 0, 0, 0
    if kernel == Kernel.BCQ_LEVEL_GEMV:
        launches = (level_launch(product, gpu),)
    elif kernel in (Kernel.BCQ_BINARY_GEMV, Kernel.BCQ_INT8_GEMV):
        launches = (tensor_core_launch(product, gpu, int8=kernel == Kernel.BCQ_INT8_GEMV),)
    elif kernel in FUSED:
        launches = gemm_launches(product, gpu)
        work_bytes, partials, counts = gemm_work(product, gpu)
        order = gemm_input_order(product, gpu)
    if not launches:
        return None
    *before, multiply = launches
    arrange = before[0].fixed("x", "arranged") if before else None
    mapped = multiply.args.get("xMap")
    names = (
        "y",
        *(() if mapped else ("x",)),
        *(("partials", "ready") if counts else ()),
        *(() if epilogue.residual is None else ("residual",)),
        *(("xMap",) if mapped else ()),
    )
    box = (mapped.box_rows, mapped.box_columns) if isinstance(mapped, TensorMap) else None
    width = epilogue.width(weight.out_features)
    return BoundProduct(multiply.fixed(*names), arrange, order, width, box, work_bytes, partials, counts)
