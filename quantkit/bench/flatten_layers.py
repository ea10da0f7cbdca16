"""Linears in the ``flatten`` format for benchmarks: sizes as the paper reports them, random content, exact check."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import BenchError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.flatten import FlattenSpec, max_code, pack_nibbles, padded_columns, unpack_codes
from quantkit.nn.flatten_linear import quantized
from quantkit.nn.inputs import kernel_input
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.flatten.layout import untile_codes
from quantkit.ops.flatten.op import flatten_quantize
from quantkit.runtime.fused_ffn import FusedPair

FLATTEN_SHARES = {  # FlattenQuant Table 4: INT4 layers of O2 and O3, extended channels per channel
    "opt-6.7b": (0.4725, 0.2441),
    "opt-13b": (0.4575, 0.2150),
    "opt-30b": (0.4829, 0.2242),
    "opt-66b": (0.4737, 0.2165),
}
_OTHER_SHARES = FLATTEN_SHARES["opt-30b"]
LINEAR_METHODS = ("fp16", "smoothquant", "flatten-o1", "flatten-o3")
INT8_ATTENTION = "flatten-o1-int8-attention"
METHODS = (*LINEAR_METHODS, INT8_ATTENTION)
"""What a context pass may be timed with; flatten-o2 has the sizes of flatten-o3, INT8_ATTENTION those of O1."""

_LARGEST_INPUT = 4.0  # activations are roughly normal with deviation 1
_WEIGHT_DEVIATION = 0.02
_UNIFORM_DEVIATION = 12**-0.5
_CHECKED_TOKENS = 8
_MOST_DIFFERING = 1e-4  # of the codes, by one, behind functions whose last bit may differ from torch's


def flatten_spec(model: str, method: str, index: int, in_features: int) -> FlattenSpec:
    """The spec of Linear number ``index`` of a model, K = in_features, under a method of METHODS but fp16.

    INT4 layers are spread evenly over the model, in the share that the paper reports; models it does not have take
    those of OPT-30B. smoothquant: INT8 without extended columns.
    """
    share, ratio = FLATTEN_SHARES.get(model, _OTHER_SHARES)
    if method == "smoothquant":
        return FlattenSpec(8, 8, padded_columns(in_features))
    int4 = method == "flatten-o3" and int((index + 1) * share) > int(index * share)
    bits = 4 if int4 else 8
    return FlattenSpec(bits, bits, padded_columns(in_features + round(in_features * ratio)))


def random_flatten_linear(spec: FlattenSpec, shape: Shape, like: Tensor) -> QuantizedLinear:
    """A Linear of random codes without bias, on the device and in the element type of ``like``.

    Every extended column is the second slice of another channel; inputs of deviation 1 give outputs near 1.
    """
    out_features, channels = shape
    device, extra = like.device, spec.extended_channels - channels
    source = torch.randperm(channels, device=device)[: min(extra, channels)].sort().values.int()
    source = torch.cat((source, source.new_zeros(extra - source.numel())))
    channel = torch.cat((torch.arange(channels, dtype=torch.int32, device=device), source))
    segment = torch.cat((channel.new_zeros(channels), channel.new_ones(extra)))
    top = max_code(spec.weight_bits)
    weight_scale = torch.tensor([_WEIGHT_DEVIATION / (2 * top * _UNIFORM_DEVIATION)], device=device)
    if spec.row_scales:
        weight_scale = weight_scale * (torch.rand(out_features, 1, device=device) + 0.5)
    codes = torch.randint(-top, top + 1, (out_features, spec.extended_channels), dtype=torch.int8, device=device)
    tensors = {
        "codes": pack_nibbles(codes) if spec.weight_bits == 4 else codes,
        "source_channel": channel,
        "source_segment": segment,
        "weight_scale": weight_scale,
        "act_scale": torch.tensor([_LARGEST_INPUT / max_code(spec.act_bits)], device=device),
    }
    if spec.smooth:
        tensors["smooth_scale"] = torch.rand(channels, device=device) + 0.5
    module = QuantizedLinear.from_packed(PackedWeight(spec, shape, tensors, {}), None, like.dtype)
    module.prepare_for_device()
    return module


def exact_sums(act_codes: Tensor, codes: Tensor) -> Tensor:
    """act_codes codes^T in fp64, which holds every sum: [M, K_ext] int8 and stored codes -> [M, N]."""
    return act_codes.double() @ unpack_codes(codes).double().T


def check_flatten_linear(what: str, module: QuantizedLinear, x: Tensor) -> None:
    """Compare y for some tokens of x [M, K] with the reference's codes and exact sums, bit for bit.

    An input that is rotated as the model runs is rotated where x is: the last bit of those sums is the device's.
    Raises BenchError where a bit differs.
    """
    tensors, chosen = module.tensors, torch.linspace(0, x.shape[0] - 1, _CHECKED_TOKENS).round().long().to(x.device)
    scales, smooth = (tensors["act_scale"], tensors["weight_scale"]), tensors.get("smooth_scale")
    acts = flatten_quantize(
        kernel_input(module.spec, x)[chosen].cpu(),
        tensors["source_channel"].cpu(),
        tensors["source_segment"].cpu(),
        scales[0].cpu(),
        None if smooth is None else smooth.cpu(),
        module.spec.act_bits,
    )
    sums = exact_sums(acts.to(x.device), tensors["codes"])
    expected = sums.float() * (scales[0] * scales[1].flatten())
    if module.bias is not None:
        expected = expected + module.bias.float()
    if not torch.equal(module(x)[chosen], expected.to(x.dtype)):
        raise BenchError(f"{what}: differs from exact integer arithmetic; not timed")


def check_fused_pair(what: str, pair: FusedPair, x: Tensor) -> None:
    """Compare the codes that a pair's first product writes for x [M, K] with those of the layers one by one.

    Raises BenchError where one differs; behind other functions than ReLU, where one differs by more than 1 or more than
    one in ten thousand do.
    """
    target, fused = pair.target, pair.codes(x)
    plain = quantized(target.spec, target.held, target.shape, pair.between(pair.source.multiply(x)))
    extended = target.spec.extended_channels
    one, other = (untile_codes(codes.tiles, x.shape[0], extended) for codes in (fused, plain))
    apart = (one.int() - other.int()).abs()
    most, share = int(apart.max()), float((apart > 0).float().mean())
    if most > (0 if ACTIVATIONS[pair.activation].exact else 1) or share > _MOST_DIFFERING:
        raise BenchError(f"{what}: {share:.2%} of the fused codes differ, by up to {most}; not timed")
