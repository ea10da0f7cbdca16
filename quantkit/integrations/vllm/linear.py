"""The method of one vLLM layer: it collects the stored Linears behind it, then multiplies by quantkit's ops.

While weights are loaded, a layer has one Parameter without elements per stored tensor's name. Its ``weight_loader`` is
all that vLLM's loaders ask for, whatever formats the Linears of a fused layer have. The tensors themselves are
registered when all have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase

from quantkit.checkpoint.config import StoredLayer
from quantkit.errors import CheckpointError
from quantkit.formats.shard import join
from quantkit.formats.table import format_name
from quantkit.integrations.vllm import DUMMY_WEIGHTS
from quantkit.integrations.vllm.gated import activation_behind
from quantkit.integrations.vllm.parts import Part, Partition, head_part, parts_of
from quantkit.nn.table import LINEARS, Layout, layout_for
from quantkit.ops.bcq.gated import can_interleave

if TYPE_CHECKING:
    from quantkit.integrations.vllm.between import EarlySiluAndMul
    from quantkit.integrations.vllm.config import QuantkitConfig

_LOGGER = init_logger(__name__)
_FINEST_GROUP = 32  # of the kernels on tensor cores
_PLAIN = "weight"
_ATTENTION_INPUTS = {"q": 0, "k": 1, "v": 2}
_HALVES = 2  # of a layer of gates and ups
_Joined = tuple[Any, tuple[int, int], dict[str, Tensor]]  # spec, shape and canonical tensors of a product


@dataclass(frozen=True)
class Product:
    """One multiplication of a layer: one stored Linear, or several of one spec.

    spec: None in floating point. shape: (N, K). fields: stored or prepared tensors -> the layer's Parameters, by name.
    gated: whether it ends with silu(gate) * up of its rows.
    """

    spec: Any
    shape: tuple[int, int]
    fields: dict[str, str]
    prepared: bool
    gated: bool = False


class QuantkitLinearMethod(LinearMethodBase):
    """What vLLM asks of a quantized Linear layer.

    names, stored: the Linears behind it, None in floating point. layout: the order of its weights on a GPU, that for
    latency where ``max_num_seqs`` is at most 4.
    """

    def __init__(self, config: QuantkitConfig, names: list[str], stored: list[StoredLayer | None]):
        self.config, self.names, self.stored = config, names, stored
        self.parts: list[Part] = []
        self.products: tuple[Product, ...] = ()
        self.dummy = False
        self.layout: Layout = "batch"
        self.sizes: list[int] = []

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Decide what this rank keeps, and register the names by which vLLM's loaders find it."""
        self.sizes = output_partition_sizes
        cut = Partition(
            out_features=tuple(output_partition_sizes),
            total=output_size,
            rank_features=input_size_per_partition,
            in_features=input_size,
            rank=layer.tp_rank,
            ranks=layer.tp_size,
            replicas=getattr(layer, "num_kv_head_replicas", 1),
        )
        self._take_parts(layer, parts_of(self.names, self.stored, cut, params_dtype, _device()))
        for part in self.parts:
            if part.finer_group is not None and part.finer_group < _FINEST_GROUP:
                _LOGGER.warning_once(
                    "quantkit: %s, cut along K over %d ranks, has groups of %d, which the fastest kernels lack",
                    part.name,
                    cut.ranks,
                    part.finer_group,
                )

    def _take_parts(self, layer: Any, parts: list[Part]) -> None:
        self.parts = parts
        settings = get_current_vllm_config()
        self.dummy = settings.load_config.load_format == DUMMY_WEIGHTS
        self.layout = layout_for(settings.scheduler_config.max_num_seqs)
        for name in self._stored_names():
            entrance = nn.Parameter(torch.empty(0), requires_grad=False)
            entrance.weight_loader = _loader(self, name)  # type: ignore[attr-defined]  # as vLLM's own Parameters have
            layer.register_parameter(name, entrance)

    def load(self, name: str, loaded: Tensor, shard_id: str | int | None) -> None:
        """Take one stored tensor of the Linear that vLLM calls ``shard_id``: q, k, v, a number, or the only one.

        Raises CheckpointError for one that does not fit, or while layers of the checkpoint have no place in the model.
        """
        self.config.check_all_placed()
        self.parts[self._index(shard_id)].take(name, loaded)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all came, join Linears of one spec, and bring them into the order of the device's kernels.

        On a GPU this also measures which kernels are fastest: nothing may be measured in a CUDA graph later.
        Raises CheckpointError naming the first tensor that did not come.
        """
        self.config.check_all_placed()
        for part in self.parts:
            if self.dummy:
                part.fill()
            for name in part.missing():
                raise CheckpointError(f"{part.name}.{name}: missing from the checkpoint; copy it again")
        for name in self._stored_names():
            delattr(layer, name)
        runs = [list(run) for _, run in groupby(self.parts, key=lambda part: part.spec)]
        products = [product for run in runs for product in _joined(run)]
        activation = self._activation(layer, products)
        if activation is None:
            self.products = tuple(_placed(layer, index, self.layout, *found) for index, found in enumerate(products))
        else:
            self.products = (_gated(layer, self.layout, *products[0]),)
            activation.passes = True
        # vLLM's LoRA layers look for this name to learn the device; a plain attribute, no Parameter.
        layer.weight_packed = getattr(layer, next(iter(self.products[0].fields.values()))).data
        self.parts = []
        if layer.weight_packed.is_cuda:
            torch.cuda.synchronize()  # kernels may read weights before their predecessors on the stream have ended

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] for x [..., K]; of a gated product [..., N / 2]."""
        if len(self.products) == 1:
            return _multiply(layer, self.products[0], x, bias)
        sizes = [product.shape[0] for product in self.products]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        pairs = zip(self.products, biases, strict=True)
        return torch.cat([_multiply(layer, product, x, own) for product, own in pairs], -1)

    def _activation(self, layer: Any, products: list[_Joined]) -> EarlySiluAndMul | None:
        """The activation that the product of gates and ups can end with, or None where this is no such layer."""
        spec, _, tensors = products[0]
        halves = len(products) == 1 and len(self.sizes) == _HALVES and len(set(self.sizes)) == 1
        if not halves or spec is None or not next(iter(tensors.values())).is_cuda:
            return None
        gates = LINEARS[format_name(spec)].interleave_gates is not None and can_interleave(self.sizes[0])
        return activation_behind(layer) if gates and layer.bias is None else None

    def _index(self, shard_id: str | int | None) -> int:
        if len(self.parts) == 1:
            return 0
        index = _ATTENTION_INPUTS.get(shard_id) if isinstance(shard_id, str) else shard_id
        if not isinstance(index, int) or not 0 <= index < len(self.parts):
            raise CheckpointError(
                f"{self.names[0]}: vLLM loads it as part {shard_id!r} of a layer, which is not supported"
            )
        return index

    def _stored_names(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.parts for name in part.tensors))


class QuantkitHeadMethod(QuantkitLinearMethod):
    """The same for a language-model head, whose rows vLLM pads to equal numbers on all ranks."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Keep the rank's tokens of the vocabulary; the rows behind them stand for none."""
        (self.padded_features,) = output_partition_sizes
        own = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        built = layer.org_vocab_size, input_size
        assert self.stored[0] is not None
        self._take_parts(layer, [head_part(self.names[0], self.stored[0], built, own, params_dtype, _device())])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits [..., rows of the rank] for x [..., K]; 0 for those that stand for no token."""
        own = self.products[0].shape[0]
        y = super().apply(layer, x, None if bias is None else bias[:own])
        return y if own == self.padded_features else pad(y, (0, self.padded_features - own))

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Raise CheckpointError: a quantized head is a tensor of its own."""
        raise CheckpointError(
            f"{self.names[0]}: is quantized, and config.json says that it is the embedding (tie_word_embeddings); "
            "copy the checkpoint again"
        )


def _device() -> torch.device:
    """Under which vLLM builds its models."""
    return torch.empty(0).device


def _loader(method: QuantkitLinearMethod, name: str) -> Callable[..., None]:
    def load(_param: nn.Parameter, loaded: Tensor, shard_id: str | int | None = None) -> None:
        method.load(name, loaded, shard_id)

    return load


def _joined(run: list[Part]) -> list[_Joined]:
    """Each product of consecutive Linears of one spec: one, where they can be joined."""
    held = [part.held or {} for part in run]
    spec, in_features = run[0].spec, run[0].kept_shape[1]
    alone = [(spec, part.kept_shape, tensors) for part, tensors in zip(run, held, strict=True)]
    if len(run) == 1:
        return alone
    if spec is None:
        whole = {_PLAIN: torch.cat([tensors[_PLAIN] for tensors in held])}
    else:
        joined = join(spec, held, in_features)
        if joined is None:
            return alone
        whole = joined
    return [(spec, (sum(shape[0] for _, shape, _ in alone), in_features), whole)]


def _placed(
    layer: Any, index: int, layout: Layout, spec: Any, shape: tuple[int, int], tensors: dict[str, Tensor]
) -> Product:
    """Register the tensors of one product, on a GPU in the order of its kernels."""
    prepare = None if spec is None else LINEARS[format_name(spec)].preparation(layout)
    prepared = prepare is not None and next(iter(tensors.values())).is_cuda
    if prepared:
        assert prepare is not None
        tensors = prepare(spec, tensors, shape)
    fields = {name: f"part{index}_{name}" for name in tensors}
    for name, tensor in tensors.items():
        layer.register_parameter(fields[name], nn.Parameter(tensor, requires_grad=False))
    return Product(spec, shape, fields, prepared)


def _gated(layer: Any, layout: Layout, spec: Any, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Product:
    """The same of a product of gates and ups that ends with its activation."""
    interleave_gates = LINEARS[format_name(spec)].interleave_gates
    assert interleave_gates is not None
    return replace(_placed(layer, 0, layout, spec, shape, interleave_gates(tensors)), gated=True)


def _multiply(layer: Any, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
    tensors = {name: getattr(layer, own) for name, own in product.fields.items()}
    if product.spec is None:
        return linear(x, tensors[_PLAIN], bias)
    row = LINEARS[format_name(product.spec)]
    if product.gated:
        assert row.gated_forward is not None
        return row.gated_forward(product.spec, tensors, product.shape, x)
    if product.prepared:
        assert row.prepared_forward is not None
        return row.prepared_forward(product.spec, tensors, product.shape, x, bias)
    return row.forward(product.spec, tensors, x, bias)
