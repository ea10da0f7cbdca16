"""What one rank keeps of each stored Linear, how it is collected tensor by tensor, and made up for dummy weights.

vLLM fuses Linears that read one input (q, k, v; gate, up) into one layer. Each stored Linear of such a layer is a part
with a format of its own, or in floating point. Nothing here needs vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.config import StoredLayer
from quantkit.errors import CheckpointError, refusing
from quantkit.formats.base import TensorSpec
from quantkit.formats.bcq import ROW_WISE
from quantkit.formats.shard import Span, check_out_spans, shard, shard_spec
from quantkit.formats.table import FORMATS, format_name
from quantkit.formats.trellis import TrellisSpec
from quantkit.quantizers.trellis.filters import FILTERS

_PLAIN = "weight"
_RANDOM_BYTES = 256
# Of made-up weights: about a model's deviation, and no mean, which would grow from layer to layer to Inf and NaN. A
# factor's codes go to 255; what a filter gives has variance 1.
_DUMMY_SCALES, _DUMMY_DEVIATION = (5e-3, 1.5e-2), 0.02
_DUMMY_ROW_SCALES = (1.5e-2, 2.5e-2)
_DUMMY_RANGES = {"offset": (-2.5e-3, 2.5e-3), "scale_factors": (2e-5, 6e-5)}


@dataclass(frozen=True)
class Partition:
    """How vLLM divides one layer among ranks.

    out_features: N of this rank for each Linear that vLLM fuses in it. total: N of all of them and all ranks together.
    rank_features, in_features: K of this rank, and of all. replicas: ranks that hold the same k and v heads.
    """

    out_features: tuple[int, ...]
    total: int
    rank_features: int
    in_features: int
    rank: int = 0
    ranks: int = 1
    replicas: int = 1

    @property
    def in_span(self) -> Span:
        """This rank's of K."""
        start = self.rank * self.rank_features if self.rank_features != self.in_features else 0
        return start, start + self.rank_features

    def whole_features(self, index: int) -> int:
        """N of a fused Linear as it is stored."""
        ranks = self.ranks // self._copies(index) if self._divides_n else 1
        return self.out_features[index] * ranks

    def span(self, index: int) -> Span:
        """This rank's of N, of a fused Linear."""
        own = self.out_features[index]
        start = self.rank // self._copies(index) * own if self._divides_n else 0
        return start, start + own

    @property
    def _divides_n(self) -> bool:
        return sum(self.out_features) != self.total

    def _copies(self, index: int) -> int:
        return self.replicas if index else 1  # q, the first, is never held twice


@dataclass
class Part:
    """What one rank keeps of one stored Linear; it arrives tensor by tensor.

    stored: None for a floating-point Linear. out_spans, in_span: what is kept of N and K. shape: (N, K) as stored.
    held: the kept tensors once all have come; spec is theirs, None in floating point.
    """

    name: str
    stored: StoredLayer | None
    shape: tuple[int, int]
    out_spans: tuple[Span, ...]
    in_span: Span
    dtype: torch.dtype
    device: torch.device
    spec: Any = None
    held: dict[str, Tensor] | None = None
    arrived: dict[str, Tensor] = field(default_factory=dict)

    @property
    def kept_spec(self) -> Any:
        """The spec of what this rank keeps, known before anything is read; None in floating point."""
        return None if self.stored is None else shard_spec(self.stored.spec, self.shape[1], self.in_span)

    @property
    def finer_group(self) -> int | None:
        """The group size of this rank's columns, where cutting them made groups finer than the stored ones."""
        stored = getattr(self.stored and self.stored.spec, "group_size", None)
        kept = None if stored is None else self.kept_spec
        return None if kept is None or kept.group_size in (stored, ROW_WISE) else int(kept.group_size)

    @property
    def kept_shape(self) -> tuple[int, int]:
        """(N, K) of what this rank keeps."""
        return sum(end - start for start, end in self.out_spans), self.in_span[1] - self.in_span[0]

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What is stored, by name."""
        if self.stored is None:
            return {_PLAIN: TensorSpec(self.shape, self.dtype)}
        return FORMATS[format_name(self.stored.spec)].tensors(self.stored.spec, self.shape)

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep one stored tensor; when it is the last of them, keep only this rank's part of all.

        Raises CheckpointError for one that does not fit, or that kernels must not read.
        """
        self._check(name, tensor)
        self.arrived[name] = tensor
        if self.arrived.keys() != self.tensors.keys():
            return
        whole, self.arrived = self.arrived, {}
        if self.stored is None:
            plain = torch.cat([whole[_PLAIN][start:end, slice(*self.in_span)] for start, end in self.out_spans])
            self.held = {_PLAIN: plain.to(self.device, self.dtype)}
            return
        row = FORMATS[format_name(self.stored.spec)]
        with refusing(f"{self.name}: an index is wrong", CheckpointError, "copy the checkpoint again"):
            row.check_indices(self.stored.spec, whole, self.shape)
        self.spec, kept = shard(self.stored.spec, whole, self.shape, out_spans=self.out_spans, in_span=self.in_span)
        # A copy even on the CPU: a view would keep the whole file's pages.
        self.held = {own: _copied(part, self.device) for own, part in kept.items()}

    def missing(self) -> list[str]:
        """The stored tensors that have not come."""
        return [] if self.held is not None else [name for name in self.tensors if name not in self.arrived]

    def fill(self) -> None:
        """Made-up tensors of the right sizes, as vLLM's dummy weights: every index leads to what is there."""
        out_features, in_features = self.kept_shape
        if self.stored is None:
            seeded = torch.Generator(self.device).manual_seed(0)
            plain = torch.empty(self.kept_shape, dtype=self.dtype, device=self.device)
            self.held = {_PLAIN: plain.normal_(0.0, _DUMMY_DEVIATION, generator=seeded)}
            return
        self.spec = self.kept_spec
        row = FORMATS[format_name(self.spec)]
        sizes = row.tensors(self.spec, (out_features, in_features))
        self.held = {name: _made_up(name, size, row.indices, self) for name, size in sizes.items()}

    def _check(self, name: str, tensor: Tensor) -> None:
        expected = self.tensors.get(name)
        if expected is None:
            raise CheckpointError(f"{self.name}.{name}: the checkpoint holds a tensor that this layer does not take")
        fits = tuple(tensor.shape) == expected.shape
        if self.stored is not None and not (fits and tensor.dtype == expected.dtype):
            fits = False
        if not fits:
            raise CheckpointError(
                f"{self.name}.{name}: stored as {tensor.dtype} {list(tensor.shape)}, expected {expected.dtype} "
                f"{list(expected.shape)}; copy the checkpoint again or quantize again"
            )
        if tensor.is_floating_point() and self.stored is not None and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.name}.{name}: holds NaN or Inf; copy the checkpoint again or quantize again")
        if not expected.holds(tensor):
            raise CheckpointError(
                f"{self.name}.{name}: holds a code above {expected.largest}; copy the checkpoint again or quantize "
                "again"
            )


def parts_of(
    names: Sequence[str],
    stored: Sequence[StoredLayer | None],
    cut: Partition,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Part]:
    """The parts of one vLLM layer, in its order along N.

    names, stored: of the Linears behind it; one where they are fused on disk as well.
    Raises CheckpointError where a stored shape is not the one that the model's config builds, or cannot be cut.
    """
    sizes = [cut.whole_features(index) for index in range(len(cut.out_features))]
    spans = [cut.span(index) for index in range(len(sizes))]
    if len(names) == 1:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        own_spans = [tuple((at + start, at + end) for at, (start, end) in zip(starts, spans, strict=True))]
        sizes = [sum(sizes)]
    elif len(names) == len(sizes):
        own_spans = [(span,) for span in spans]
    else:
        raise CheckpointError(f"{names[0]}: vLLM fuses {len(sizes)} Linears here, the checkpoint has {len(names)}")
    parts = []
    for name, layer, size, own in zip(names, stored, sizes, own_spans, strict=True):
        built = size, cut.in_features
        if layer is not None:
            _check_layer(name, layer, built, own, cut.in_span)
        parts.append(Part(name, layer, built, own, cut.in_span, dtype, device))
    return parts


def head_part(
    name: str, layer: StoredLayer, built: tuple[int, int], out_span: Span, dtype: torch.dtype, device: torch.device
) -> Part:
    """The part of a head. built: (N, K) without padding. out_span: this rank's of N.

    Raises CheckpointError where the stored shape is not the one that the model's config builds, or the rank has none.
    """
    in_span = (0, built[1])
    if out_span[0] >= out_span[1]:
        raise CheckpointError(f"{name}: its {built[0]} rows do not reach all GPUs; serve it on fewer")
    _check_layer(name, layer, built, (out_span,), in_span)
    return Part(name, layer, built, (out_span,), in_span, dtype, device)


def expert_part(
    name: str,
    layer: StoredLayer,
    built: tuple[int, int],
    cut: Span,
    dtype: torch.dtype,
    device: torch.device,
    *,
    along_k: bool,
) -> Part:
    """The part of one expert's Linear. built: (N, K) of the whole. cut: this rank's of K, or else of N.

    Raises CheckpointError where the stored shape is not the one that the model's config builds, or cannot be cut.
    """
    out_span, in_span = ((0, built[0]), cut) if along_k else (cut, (0, built[1]))
    _check_layer(name, layer, built, (out_span,), in_span)
    return Part(name, layer, built, (out_span,), in_span, dtype, device)


def _check_layer(
    name: str, layer: StoredLayer, built: tuple[int, int], out_spans: Sequence[Span], in_span: Span
) -> None:
    """Before anything is read: whether it is the model's, and can be cut there."""
    if layer.shape != built:
        raise CheckpointError(f"{name}: config.json builds it as {built}, stored is {layer.shape}")
    try:
        check_out_spans(layer.spec, layer.shape[0], out_spans)
        shard_spec(layer.spec, layer.shape[1], in_span)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def _made_up(name: str, size: TensorSpec, indices: Sequence[str], part: Part) -> Tensor:
    device, in_features = part.device, part.kept_shape[1]
    if name in indices:
        return _made_up_index(name, size, in_features, device)
    if name == "filter":
        return made_up_filter(part.spec).to(device)
    seeded = torch.Generator(device).manual_seed(0)
    if size.dtype.is_floating_point:
        scales = _DUMMY_ROW_SCALES if isinstance(part.spec, TrellisSpec) else _DUMMY_SCALES
        low, high = _DUMMY_RANGES.get(name, scales)
        return torch.empty(size.shape, dtype=size.dtype, device=device).uniform_(low, high, generator=seeded)
    codes = _RANDOM_BYTES if size.largest is None else size.largest + 1
    drawn = torch.randint(0, codes, size.shape, generator=seeded, dtype=torch.uint8, device=device)
    return drawn.view(size.dtype)


def made_up_filter(spec: TrellisSpec) -> Tensor:
    """[q, taps] fp32: that of the quantizer, or equal taps where it has none."""
    equal = ((spec.weight_bits * spec.taps) ** -0.5,) * spec.taps
    found = FILTERS.get((spec.weight_bits, spec.taps), (equal,) * spec.weight_bits)
    return torch.tensor(found, dtype=torch.float32)  # the engine loads with a default type of 16 bits


def _made_up_index(name: str, size: TensorSpec, in_features: int, device: torch.device) -> Tensor:
    """The map of flatten: channels in order, again and again; every column is the first slice of its channel."""
    if name == "source_channel":
        return torch.arange(size.shape[0], dtype=size.dtype, device=device) % in_features
    return torch.zeros(size.shape, dtype=size.dtype, device=device)
