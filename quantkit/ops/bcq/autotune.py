"""Which bcq kernel multiplies how many tokens: measured once per GPU and shape class, kept in the user's cache.

kernels/bcq/measured.json comes with quantkit: {GPU: {shape class: {tokens: kernel}}}, made by
scripts/nuqmm/measure_kernels.py, so that common shapes are not measured again on these GPUs. The user's table goes
before it, and what neither has is chosen by the GPU generation.

The user's table is ``kernels/bcq_autotune.json`` in quantkit's cache folder. GPU is its name and a digest of the
kernels there, so that other kernels are measured anew. Editing an entry overrides it; deleting one has it measured
again when a layer of that class is next prepared.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import sha256
from math import log2
from pathlib import Path

import torch
from torch import Tensor

from quantkit.assets import asset_folder, cache_folder
from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.cuda.compile import write_whole
from quantkit.cuda.device import gpu_of
from quantkit.cuda.timing import cold_seconds
from quantkit.errors import KernelError
from quantkit.formats.bcq import CODE_BITS
from quantkit.ops.bcq.candidates import binary_segment, candidates
from quantkit.ops.bcq.gemm import FUSED
from quantkit.ops.bcq.instances import SOURCES
from quantkit.ops.bcq.launch import product
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.order import Order
from quantkit.storage.checks import check_document, map_of, text
from quantkit.storage.documents import read_json

TOKEN_CLASSES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_FEW_TOKENS = 8
_GEMM_TOKENS = 4  # from which on the fused product may be fastest
_GEMV_TOKENS = 16  # up to which INT8 products for 8 tokens may be
_MANY_TOKENS = 256  # up to which the fused product is faster than dequantizing on an H200, whatever the weight
_FUSED_BITS = 4  # planes, of no grid, up to which it is so at any number of tokens where pairs copy x, in wide groups
_WIDE_SEGMENT = 128  # from which on binary products of one token are faster, and of two in most cases
_FINE_SEGMENT = 32  # where INT8 products of one token are faster too
_CLEARLY = 0.95  # of the usual kernel's time, from where on another is taken: measurements this short differ by 5 %
_DIGEST = 8
_CHOICES = 1 << 14  # kept: layers of a model times numbers of tokens that a server meets
_TABLE = Path("kernels") / "bcq_autotune.json"
_SHIPPED = Path("bcq") / "measured.json"

_ORDER_NAMES = {Order.PLANES: "", Order.CODES: "-batch", Order.GRID: "-grid"}  # in the table
_AGAIN = "delete it to measure again"

Measurements = dict[str, dict[str, dict[str, str]]]
_DEPENDENT: list[Callable[[], None]] = []


@cache
def shape_class(
    weight_bits: int,
    out_features: int,
    in_features: int,
    group_size: int,
    scale_bits: int = 16,
    order: Order = Order.PLANES,
) -> str:
    """Shapes that share a measurement: planes, segment, N and K to the nearest power of two, scales, order."""
    segment = binary_segment(group_size, in_features) or "bytes"
    scales = f"-scales{scale_bits}" if scale_bits == CODE_BITS else ""
    suffix = _ORDER_NAMES[order]
    return f"q{weight_bits}-s{segment}-n{round(log2(out_features))}-k{round(log2(in_features))}{scales}{suffix}"


@cache
def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def gpu_key(device: torch.device) -> str:
    """Under which a GPU's measurements stand in the table."""
    sources = "".join(repr((source.text, source.options)) for source in SOURCES.values())
    return f"{_gpu_name(device)}, kernels {sha256(sources.encode()).hexdigest()[:_DIGEST]}"


@cache
def _shipped() -> Measurements:
    shipped: Measurements = json.loads((asset_folder("kernels") / _SHIPPED).read_text(encoding="utf-8"))
    return shipped


def _known(device: torch.device, name: str) -> dict[str, str] | None:
    """The kernels of a shape class on the GPU: of the user's table, or those that came with quantkit."""
    own = _table().get(gpu_key(device), {}).get(name)
    return own if own is not None else _shipped().get(_gpu_name(device), {}).get(name)


@cache
def _table() -> Measurements:
    path = cache_folder() / _TABLE
    if not path.exists():
        return {}
    what = f"kernel table {path}"
    table: Measurements = read_json(path, what, KernelError, _AGAIN)
    check_document(table, map_of(map_of(map_of(text))), what, KernelError, _AGAIN)
    for gpu, classes in table.items():
        for name, kernels in classes.items():
            for kernel in kernels.values():
                if kernel not in SOURCES:
                    raise KernelError(f"{what}: unknown kernel {kernel!r} for {gpu}, {name}")
    return table


def _architecture(device: torch.device) -> Architecture:
    return gpu_of(device).architecture


def _narrow(group_size: int, in_features: int) -> bool:
    segment = binary_segment(group_size, in_features)
    return segment is not None and segment < _WIDE_SEGMENT


def _least_int8_tokens(native: bool, group_size: int, in_features: int) -> int:
    if binary_segment(group_size, in_features) == _FINE_SEGMENT:
        return 1
    return 2 if _narrow(group_size, in_features) or not native else 3


def _unmeasured(
    tokens: int, weight_bits: int, in_features: int, group_size: int, order: Order, usable: tuple[Kernel, ...]
) -> Kernel:
    binary = Kernel.BCQ_BINARY_GEMV in usable
    pairs = Kernel.BCQ_GEMM_WGMMA in usable
    always = pairs and (weight_bits <= _FUSED_BITS or order == Order.GRID) and not _narrow(group_size, in_features)
    fused = [kernel for kernel in FUSED if kernel in usable and (always or tokens <= _MANY_TOKENS)]
    if tokens <= _FEW_TOKENS and Kernel.BCQ_LEVEL_GEMV in usable:
        return Kernel.BCQ_LEVEL_GEMV
    if tokens > _FEW_TOKENS or Kernel.BCQ_LUT_GEMV not in usable:
        return fused[0] if fused else Kernel.BCQ_DEQUANTIZE
    if Kernel.BCQ_INT8_GEMV in usable and tokens >= _least_int8_tokens(binary, group_size, in_features):
        return Kernel.BCQ_INT8_GEMV
    return Kernel.BCQ_BINARY_GEMV if binary else Kernel.BCQ_LUT_GEMV


def choose(
    x: Tensor,
    weight_bits: int,
    out_features: int,
    group_size: int,
    scale_bits: int = 16,
    *,
    order: Order = Order.PLANES,
) -> str:
    """The kernel for x [M, K]: the measured one, or by the GPU generation where this class was never measured.

    Raises KernelError for a damaged table.
    """
    return _chosen(x.device, x.dtype, *x.shape, weight_bits, out_features, group_size, scale_bits, order)


@lru_cache(_CHOICES)
def _chosen(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    in_features: int,
    weight_bits: int,
    out_features: int,
    group_size: int,
    scale_bits: int,
    order: Order,
) -> str:
    shape = {"weight_bits": weight_bits, "group_size": group_size, "in_features": in_features}
    usable = candidates(dtype, _architecture(device), **shape, order=order)
    if tokens > TOKEN_CLASSES[-1] or usable == (Kernel.BCQ_DEQUANTIZE,):
        return Kernel.BCQ_DEQUANTIZE
    name = shape_class(weight_bits, out_features, in_features, group_size, scale_bits, order)
    kernels = _known(device, name) or {}
    kernel = kernels.get(str(next(count for count in TOKEN_CLASSES if count >= tokens)))
    return _unmeasured(tokens, weight_bits, in_features, group_size, order, usable) if kernel is None else kernel


def read_table_again() -> None:
    """Forget what the user's table said, and what was chosen by it."""
    _table.cache_clear()
    _chosen.cache_clear()
    for forget in _DEPENDENT:
        forget()


def forgotten_with_the_table(forget: Callable[[], None]) -> Callable[[], None]:
    """Have a function called whenever the table is read again: choices that others keep are made anew."""
    _DEPENDENT.append(forget)
    return forget


def ensure_measured(weight: BcqTiles) -> None:
    """Measure this weight's shape class on its GPU, unless the table has it; also compiles the kernels it may use.

    Fractions of a second per class. Raises KernelError where a kernel cannot be built.
    """
    device = weight.tiles.device
    sizes = weight.weight_bits, weight.out_features, weight.in_features
    name = shape_class(*sizes, weight.group_size, weight.scale_bits, weight.order)
    if _known(device, name) is not None:
        return
    kernels = measured_kernels(weight)
    with _written_alone():
        table, gpu = _table(), gpu_key(device)
        own = table.get(gpu, {})
        content = json.dumps({**table, gpu: {**own, name: own.get(name, kernels)}}, indent=1) + "\n"
        write_whole(cache_folder() / _TABLE, content.encode())
    read_table_again()


@contextmanager
def _written_alone() -> Iterator[None]:
    """Hold the user's table, as it is now, against other processes: the ranks of a served model measure at one time.

    Each keeps what another has found meanwhile, so that all take the kernels of the first.
    Raises KernelError where the cache cannot be written.
    """
    path = (cache_folder() / _TABLE).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise KernelError(f"kernel cache {path.parent}: cannot be written ({error.strerror})") from error
    with lock:
        with suppress(OSError):  # where the file system has no locks, the last to write is kept
            fcntl.flock(lock, fcntl.LOCK_EX)
        read_table_again()
        yield


def measured_kernels(weight: BcqTiles, classes: Sequence[int] = TOKEN_CLASSES) -> dict[str, str]:
    """By number of tokens the kernel that is clearly fastest on this weight's GPU, or the usual one."""
    device, in_features = weight.tiles.device, weight.in_features
    best: dict[str, str] = {}
    other = _copy(weight)
    shape = {"weight_bits": weight.weight_bits, "group_size": weight.group_size, "in_features": in_features}
    usable = candidates(torch.float16, _architecture(device), **shape, order=weight.order)
    for tokens in classes:
        usual = _unmeasured(tokens, weight.weight_bits, in_features, weight.group_size, weight.order, usable)
        x = torch.randn(tokens, in_features, dtype=torch.float16, device=device)
        seconds = {
            kernel: cold_seconds(_call(kernel, x, other), _call(kernel, x, weight), device)
            for kernel in usable
            if _worth_measuring(kernel, tokens, _narrow(weight.group_size, in_features))
        }
        best[str(tokens)] = _clear_winner(seconds, usual)
    return best


def _clear_winner(seconds: dict[Kernel, float], usual: Kernel) -> Kernel:
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _CLEARLY * seconds[usual] else usual


def _worth_measuring(kernel: Kernel, tokens: int, narrow: bool) -> bool:
    if kernel == Kernel.BCQ_LUT_GEMV:
        return tokens <= _FEW_TOKENS
    if kernel == Kernel.BCQ_DEQUANTIZE:
        return tokens > 1  # it moves several times the bytes of a product of one token
    if kernel in FUSED:
        return tokens >= _GEMM_TOKENS
    if kernel == Kernel.BCQ_LEVEL_GEMV:
        return tokens <= _GEMV_TOKENS
    return tokens <= _GEMV_TOKENS and (kernel != Kernel.BCQ_INT8_GEMV or tokens > 1 or narrow)


def _copy(weight: BcqTiles) -> BcqTiles:
    factors = None if weight.factor_tiles is None else weight.factor_tiles.clone()
    return replace(weight, tiles=weight.tiles.clone(), scale_tiles=weight.scale_tiles.clone(), factor_tiles=factors)


def _call(kernel: Kernel, x: Tensor, weight: BcqTiles) -> Callable[[], Tensor]:
    return lambda: product(kernel, x, weight, None, weights_ready=True)
