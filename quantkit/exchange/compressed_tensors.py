"""compressed-tensors checkpoints of integers, as llm-compressor writes them: pack-quantized and int-quantized.

Per Linear [N, K], G groups per row, w = scale * (q - zero_point), q signed:
    pack-quantized: weight_packed [N, ceil(K * bits / 32)] int32, a stream of q + 2**(bits - 1) along each row;
        weight_scale [N, G] or [1]; weight_shape [2]; weight_zero_point [ceil(N * bits / 32), G] int32, a stream down
        each column, or int8 [N, G] in earlier versions. Those also left 3, 5, 6 and 7 bits in whole words.
    int-quantized: weight [N, K] int8, weight_scale [N, 1] or [1], weight_zero_point int8; input_scale [1] where
        activations are static.
INT8 on both sides with one static scale for all activations, and one for all or for each row of the weight, is the
``flatten`` format without extra columns. Other activations have no kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.errors import CheckpointError, RecipeError
from quantkit.exchange.gptq import FLOATS
from quantkit.exchange.grid import Grid, check_zero
from quantkit.exchange.source import COPY, Folder, Get, Layout, SourceLayer, check_groups
from quantkit.exchange.words import WORD_BITS, stream_words, unpack_padded, unpack_stream
from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import FlattenSpec, padded_columns
from quantkit.storage.checks import anything, check_document, list_of, map_of, nullable, record, text

PACKED, INTEGER = "pack-quantized", "int-quantized"
FORMATS = (PACKED, INTEGER)
MIXED = "mixed-precision"
_BYTE_BITS = 8
_LEFT_OUT = "activations left in floating point"
_ARGS = record({}, {"strategy": nullable(text)})
_GROUP = record(
    {"targets": list_of(text, least=1), "weights": _ARGS},
    {"input_activations": nullable(_ARGS), "output_activations": nullable(_ARGS), "format": nullable(text)},
)
_DOCUMENT = record(
    {"format": text, "config_groups": map_of(_GROUP, least=1)},
    {"ignore": nullable(list_of(text)), "quantization_status": nullable(text), "kv_cache_scheme": anything},
)


@dataclass(frozen=True)
class _Scheme:
    """One config group: what it says of weights and activations.

    input_bits: None where activations are in floating point. static_inputs: INT8 with one stored scale per tensor.
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    group_size: int
    strategy: str
    input_bits: int | None
    static_inputs: bool


def layers(folder: Folder, *, weights_only: bool) -> dict[str, SourceLayer]:
    """The Linears of a folder.

    weights_only: drop the quantization of activations where quantkit has no kernels for it, instead of refusing.
    Raises CheckpointError for formats, types and activations that quantkit does not know.
    """
    schemes = _schemes(folder.document)
    found = {}
    for name in folder.modules_with("weight_scale"):
        scheme = _scheme_of(name, schemes)
        packed = f"{name}.weight_packed" in folder.tensors
        if packed != (scheme.format == PACKED):
            raise CheckpointError(f"{name}: is not stored as {scheme.format}, which its config group says")
        layer = _packed_layer(folder, name, scheme) if packed else _integer_layer(folder, name, scheme)
        found[name] = _with_activations(folder, layer, scheme, weights_only=weights_only)
    for name in folder.modules_with("weight_packed"):
        if name not in found:
            raise CheckpointError(f"{name}.weight_scale: missing from {folder.path}; {COPY}")
    return found


def _schemes(document: Mapping[str, Any]) -> list[_Scheme]:
    check_document(document, _DOCUMENT, "quantization_config", CheckpointError)
    stated = document["format"]
    if stated not in (*FORMATS, MIXED):
        raise CheckpointError(f"quantization_config: format is {stated!r}; known: {', '.join(FORMATS)}")
    if document.get("quantization_status", "compressed") not in ("compressed", None):
        raise CheckpointError(f"quantization_config: quantization_status is {document['quantization_status']!r}")
    if document.get("kv_cache_scheme"):
        raise CheckpointError("quantization_config: kv_cache_scheme is set; quantkit quantizes no KV cache")
    if document.get("sparsity_config"):
        raise CheckpointError("quantization_config: sparsity_config is set; quantkit reads dense weights")
    return [_scheme(name, group, stated) for name, group in document["config_groups"].items()]


def _scheme(name: str, group: Mapping[str, Any], stated: str) -> _Scheme:
    weights, inputs = group["weights"], group.get("input_activations") or {}
    where = f"quantization_config: {name}"
    own = group.get("format") or stated
    if own not in FORMATS:
        raise CheckpointError(f"{where}: format is {own!r}; known: {', '.join(FORMATS)}")
    bits, kind = weights.get("num_bits", _BYTE_BITS), weights.get("type", "int")
    if kind != "int" or not isinstance(bits, int) or not 2 <= bits <= _BYTE_BITS:
        raise CheckpointError(f"{where}: weights are {kind!r} of {bits!r} bits; quantkit reads 'int' of 2 to 8")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise CheckpointError(f"{where}: actorder is {weights['actorder']!r}, which takes the columns of a group apart")
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations are quantized, for which quantkit has no kernels")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size and size > 0 else "channel" if size else "tensor")
    if strategy not in ("group", "channel", "tensor"):
        raise CheckpointError(f"{where}: strategy is {strategy!r}; quantkit reads group, channel and tensor")
    input_bits = inputs.get("num_bits", _BYTE_BITS) if inputs else None
    if inputs and (isinstance(input_bits, bool) or not isinstance(input_bits, int)):
        raise CheckpointError(f"{where}: input_activations have num_bits {input_bits!r}, which is no whole number")
    static = bool(inputs) and not inputs.get("dynamic") and inputs.get("strategy") in (None, "tensor")
    fits = static and inputs.get("symmetric", True) and input_bits == _BYTE_BITS
    fits = fits and inputs.get("type", "int") == "int"
    return _Scheme(
        targets=tuple(group["targets"]),
        format=own,
        bits=bits,
        group_size=size if isinstance(size, int) and not isinstance(size, bool) else -1,
        strategy=strategy,
        input_bits=input_bits,
        static_inputs=bool(fits),
    )


def _scheme_of(name: str, schemes: list[_Scheme]) -> _Scheme:
    """The group of a module: one that names it, or else one that matches it, or else the one for all Linears."""
    for scheme in schemes:
        if name in scheme.targets:
            return scheme
    for scheme in schemes:
        for target in scheme.targets:
            if target.startswith("re:"):
                try:
                    matches = re.match(target.removeprefix("re:"), name)
                except re.error as error:
                    raise CheckpointError(f"quantization_config: the target {target!r} is wrong ({error})") from error
                if matches:
                    return scheme
    for scheme in schemes:
        if "Linear" in scheme.targets:
            return scheme
    raise CheckpointError(f"{name}: is quantized, but no config group targets it")


def _packed_layer(folder: Folder, name: str, scheme: _Scheme) -> SourceLayer:
    fields = {field: f"{name}.{field}" for field in ("weight_packed", "weight_scale", "weight_shape")}
    folder.field(fields["weight_shape"], ("I64", "I32"), (2,))
    if f"{name}.weight_g_idx" in folder.tensors:
        raise CheckpointError(f"{name}.weight_g_idx: the columns of a group are apart, which quantkit does not store")
    rows, columns = map(int, folder.get(fields["weight_shape"]).tolist())
    words = folder.field(fields["weight_packed"], ("I32",), (rows, None)).shape[1]
    if columns <= 0 or words not in (stream_words(columns, scheme.bits), _padded_words(columns, scheme.bits)):
        raise CheckpointError(f"{name}: {words} words a row hold no {columns} codes of {scheme.bits} bits")
    group_size = _check_scales(folder, name, scheme, (rows, columns))
    if f"{name}.weight_zero_point" in folder.tensors:
        fields["weight_zero_point"] = f"{name}.weight_zero_point"
        folder.field(fields["weight_zero_point"], ("I32", "I8"), (None, None))
    return SourceLayer(name, (rows, columns), scheme.bits, group_size, fields, folder.bytes_of(fields))


def _integer_layer(folder: Folder, name: str, scheme: _Scheme) -> SourceLayer:
    fields = {field: f"{name}.{field}" for field in ("weight", "weight_scale")}
    rows, columns = folder.field(fields["weight"], ("I8",), (None, None)).shape
    group_size = _check_scales(folder, name, scheme, (rows, columns))
    if f"{name}.weight_zero_point" in folder.tensors:
        fields["weight_zero_point"] = f"{name}.weight_zero_point"
        folder.field(fields["weight_zero_point"], ("I8",))
    return SourceLayer(name, (rows, columns), _BYTE_BITS, group_size, fields, folder.bytes_of(fields))


def _check_scales(folder: Folder, name: str, scheme: _Scheme, shape: tuple[int, int]) -> int:
    """The group size that the scales of a layer [N, K] stand for."""
    stored = folder.field(f"{name}.weight_scale", FLOATS)
    if stored.shape in ((), (1,)) or scheme.strategy == "tensor":
        folder.field(f"{name}.weight_scale", FLOATS, () if stored.shape == () else (1,))
        return -1
    groups = folder.field(f"{name}.weight_scale", FLOATS, (shape[0], None)).shape[1]
    return check_groups(name, scheme.group_size if scheme.strategy == "group" else -1, groups, shape[1])


def _with_activations(folder: Folder, layer: SourceLayer, scheme: _Scheme, *, weights_only: bool) -> SourceLayer:
    """The layer with its quantized activations, where the scheme has some."""
    consumed = {
        f"{kind}_{what}": f"{layer.name}.{kind}_{what}"
        for kind in ("input", "output")
        for what in ("scale", "zero_point")
        if f"{layer.name}.{kind}_{what}" in folder.tensors
    }
    fields = {**layer.fields, **consumed}
    symmetric = scheme.format == INTEGER and "weight_zero_point" not in layer.fields
    runs = scheme.static_inputs and symmetric and layer.group_size == -1  # one scale for all, or for each row
    if scheme.input_bits is None:
        return replace(layer, fields=fields, bytes=folder.bytes_of(fields))
    if not runs and not weights_only:
        raise CheckpointError(
            f"{layer.name}: its activations are quantized other than by one static scale per tensor beside symmetric "
            "INT8 weights with one scale or one per row; pass `weights_only` to convert the weights alone"
        )
    if not weights_only:
        folder.field(f"{layer.name}.input_scale", FLOATS)
    note = _LEFT_OUT if weights_only else ""
    return replace(layer, fields=fields, bytes=folder.bytes_of(fields), act_bits=scheme.input_bits, note=note)


def _padded_words(columns: int, bits: int) -> int:
    return -(-columns // (WORD_BITS // bits))


def _grid(layer: SourceLayer, get: Get) -> Grid:
    rows, half = layer.shape[0], 2 ** (layer.bits - 1)
    step = get(layer.fields["weight_scale"]).double()
    step = step.reshape(1, 1).expand(rows, 1) if step.numel() == 1 else step
    if not torch.isfinite(step).all():
        raise CheckpointError(f"{layer.name}.weight_scale: holds NaN or Inf; {COPY}")
    zero = torch.full(step.shape, half, dtype=torch.int32)
    if "weight_zero_point" in layer.fields:
        stored = get(layer.fields["weight_zero_point"])
        if stored.dtype == torch.int32:
            zero = _unpacked(stored.t(), layer, rows).t().int()
        else:
            zero = stored.int().reshape(-1, step.shape[1]) + half
        if zero.shape != step.shape:
            zero = zero.expand(step.shape) if zero.numel() == 1 else zero
        if zero.shape != step.shape:
            raise CheckpointError(f"{layer.name}.weight_zero_point: does not fit its scales {list(step.shape)}")
    return Grid(layer.bits, layer.group_size, step.contiguous(), zero=check_zero(zero, layer.bits, layer.name))


def _codes(layer: SourceLayer, get: Get) -> Tensor:
    if "weight" in layer.fields:
        return get(layer.fields["weight"]).view(torch.uint8) ^ 0x80  # q + 128
    return _unpacked(get(layer.fields["weight_packed"]), layer, layer.shape[1])


def _unpacked(words: Tensor, layer: SourceLayer, codes: int) -> Tensor:
    words = words.contiguous()
    if words.shape[1] == stream_words(codes, layer.bits):
        return unpack_stream(words, layer.bits, codes)
    if words.shape[1] != _padded_words(codes, layer.bits):
        raise CheckpointError(f"{layer.name}: {words.shape[1]} words hold no {codes} codes of {layer.bits} bits")
    return unpack_padded(words, layer.bits, codes)


def _static(layer: SourceLayer, get: Get) -> PackedWeight | None:
    """The ``flatten`` form of a layer with static INT8 activations; None for other layers."""
    if layer.act_bits != _BYTE_BITS or layer.note == _LEFT_OUT:
        return None
    rows, columns = layer.shape
    stored = get(layer.fields["weight_scale"]).float()
    row_scales = stored.dim() > 1
    weight_scale = stored if row_scales else stored.reshape(1)
    act_scale = get(layer.fields["input_scale"]).float().reshape(-1)[:1].clone()
    for field, scale in (("weight_scale", weight_scale), ("input_scale", act_scale)):
        if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
            raise CheckpointError(f"{layer.name}.{field}: is no number above 0; {COPY}")
    try:
        spec = FlattenSpec(_BYTE_BITS, _BYTE_BITS, padded_columns(columns), row_scales=row_scales)
    except RecipeError as error:
        raise CheckpointError(f"{layer.name}: {error}") from error
    extra = spec.extended_channels - columns
    tensors = {
        "codes": pad(get(layer.fields["weight"]), (0, extra)),
        "source_channel": pad(torch.arange(columns, dtype=torch.int32), (0, extra)),
        "source_segment": torch.zeros(spec.extended_channels, dtype=torch.int32),
        "weight_scale": weight_scale,
        "act_scale": act_scale,
    }
    return PackedWeight(spec, (rows, columns), tensors, {"exact": True, "rounding": 0.0, "extra_planes": 0})


LAYOUT = Layout(_grid, _codes, _static)
