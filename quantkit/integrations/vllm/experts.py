"""The method of one block's experts in vLLM: it collects the Linears of this rank's experts, then runs all at once.

vLLM's loaders name the Linears of an expert w1 (gate), w3 (up) and w2 (down) and hand over their tensors one by one.
The first two are one product of N = 2 * intermediate. The router is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.platforms import current_platform

from quantkit.checkpoint.config import StoredLayer
from quantkit.cuda.device import gpu_of
from quantkit.errors import CheckpointError
from quantkit.formats.bcq import BcqSpec, BcqTensors
from quantkit.formats.shard import join
from quantkit.formats.table import format_name
from quantkit.integrations.vllm import DUMMY_WEIGHTS
from quantkit.integrations.vllm.parts import Part, expert_part
from quantkit.ops.bcq.experts import MOST_EXPERTS, fits_experts
from quantkit.ops.bcq.layout import BcqTiles, join_experts, tile
from quantkit.ops.bcq.op import bcq_experts

if TYPE_CHECKING:
    from quantkit.integrations.vllm.config import QuantkitConfig

_HUB_NAMES = ({"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}, {"w1": "w1", "w3": "w3", "w2": "w2"})
_PRODUCTS = {"w13": ("w1", "w3"), "w2": ("w2",)}
_PRODUCT_OF = {place: product for product, places in _PRODUCTS.items() for place in places}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}
_TILES = ("tiles", "scale_tiles", "factor_tiles")


class QuantkitExpertsMethod(FusedMoEMethodBase):
    """What vLLM asks of a block's quantized experts.

    prefix: vLLM's name of the layer. moe: vLLM's description of it.
    Raises CheckpointError for experts that cannot run at once.
    """

    def __init__(self, config: QuantkitConfig, prefix: str, moe: Any):
        super().__init__(moe)
        self.config, self.prefix = config, prefix
        self.stored = stored_experts(prefix, config.layers, moe.num_experts)
        self.parts: dict[tuple[int, str], Part] = {}
        self.out_features: dict[str, int] = {}
        self.group_sizes: dict[str, int] = {}
        self.dummy = False
        _refuse(prefix, moe)

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer asks for routing as well: on a CPU, where vLLM's routers, which are GPU kernels, lack."""
        return bool(current_platform.is_cpu())

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it describes weights to vLLM's own kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Decide what this rank keeps, and register the names by which vLLM's loaders find it.

        Raises CheckpointError where the stored shapes are not those of the model's config or cannot be cut, or a GPU
        has no kernel for them.
        """
        if layer.apply_router_weight_on_input or layer.swiglu_limit is not None:
            raise CheckpointError(
                f"{self.prefix}: experts whose input is weighted, or whose gate is clamped, are not served; "
                "use transformers"
            )
        self.dummy = get_current_vllm_config().load_config.load_format == DUMMY_WEIGHTS
        device, own = torch.empty(0).device, intermediate_size_per_partition
        cut = (self.moe.tp_rank * own, self.moe.tp_rank * own + own)
        built = dict.fromkeys(_PRODUCTS["w13"], (own * self.moe.tp_size, hidden_size))
        built["w2"] = hidden_size, own * self.moe.tp_size
        for expert in self._own_experts(layer, num_experts):
            for place, shape in built.items():
                name, stored = self.stored[expert, place]
                part = expert_part(name, stored, shape, cut, params_dtype, device, along_k=place == "w2")
                self.parts[expert, place] = part
        for product, places in _PRODUCTS.items():
            first = self.parts[next(iter(self.parts))[0], places[0]]
            self.out_features[product] = first.kept_shape[0] * len(places)
            self.group_sizes[product] = first.kept_spec.group_size
            self._check_kernels(first, params_dtype)
            for name in first.tensors:
                entrance = nn.Parameter(torch.empty(0), requires_grad=False)
                entrance.weight_loader = self._loader(name)  # type: ignore[attr-defined]  # as vLLM's have
                layer.register_parameter(f"{product}_{name}", entrance)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all came and bring them into the order of the kernels, expert after expert.

        Raises CheckpointError naming the first tensor that did not come.
        """
        self.config.check_all_placed()
        for part in self.parts.values():
            if self.dummy:
                part.fill()
            for name in part.missing():
                raise CheckpointError(f"{part.name}.{name}: missing from the checkpoint; copy it again")
        for product, places in _PRODUCTS.items():
            for name in self.parts[next(iter(self.parts))[0], places[0]].tensors:
                delattr(layer, f"{product}_{name}")
            experts = dict.fromkeys(expert for expert, _ in self.parts)
            weight = join_experts([_tiled([self.parts[expert, place] for place in places]) for expert in experts])
            for name in _TILES:
                tensor = getattr(weight, name)
                if tensor is not None:
                    layer.register_parameter(f"{product}_{name}", nn.Parameter(tensor, requires_grad=False))
        self.parts = {}
        if layer.w13_tiles.is_cuda:
            torch.cuda.synchronize()  # kernels may read weights before their predecessors on the stream have ended

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """y [tokens, hidden] of this rank for x [tokens, hidden]; weights and experts of every choice, [tokens, top_k].

        What all experts share is vLLM's, which adds it.
        """
        chosen = topk_ids.reshape(-1).long()
        if layer.expert_map is not None:
            chosen = layer.expert_map[chosen].long()  # -1 for those of other ranks
        gate, up = self._product(layer, "w13", x, chosen).chunk(2, dim=-1)
        y = self._product(layer, "w2", _GATES[self.moe.activation.value](gate) * up, chosen)
        weighted = y * topk_weights.reshape(-1, 1)
        return weighted.view(*topk_ids.shape, -1).sum(dim=1).to(x.dtype)

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """The same for the router's logits [tokens, experts], by vLLM's routing of CPUs."""
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        weights, ids = select_experts(
            x,
            router_logits,
            layer.top_k,
            layer.use_grouped_topk,
            layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self.apply(layer, x, weights, ids)

    def _product(self, layer: Any, product: str, x: Tensor, chosen: Tensor) -> Tensor:
        tiles, scale_tiles, factor_tiles = (getattr(layer, f"{product}_{name}", None) for name in _TILES)
        sizes = self.out_features[product], self.group_sizes[product]
        return bcq_experts(x, chosen, tiles, scale_tiles, None, *sizes, factor_tiles=factor_tiles)

    def _own_experts(self, layer: Any, own: int) -> list[int]:
        """The experts on this rank, in the order of its numbers for them."""
        places = {
            layer.expert_map_manager.map_global_to_local(expert): expert for expert in range(self.moe.num_experts)
        }
        return [places[index] for index in range(own)]

    def _loader(self, name: str) -> Callable[..., bool]:
        def load(
            param: nn.Parameter,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            """Whether the expert is one of this rank's; the names of the parameters are vLLM's."""
            self.config.check_all_placed()
            part = self.parts.get((expert_id, shard_id))
            if part is not None:
                part.take(name, loaded_weight)
            return part is not None

        return load

    def _check_kernels(self, part: Part, dtype: torch.dtype) -> None:
        if part.device.type != "cuda":
            return
        spec, row = part.kept_spec, gpu_of(part.device).architecture
        sizes = {"weight_bits": spec.weight_bits, "group_size": spec.group_size, "in_features": part.kept_shape[1]}
        if not fits_experts(dtype, row, **sizes) or self.moe.num_experts > MOST_EXPERTS:
            raise CheckpointError(
                f"{part.name}: {spec} with activations in {dtype} has no kernel that runs all experts at once; serve "
                "in float16 or bfloat16 with groups of a multiple of 32 on each GPU, and at most "
                f"{MOST_EXPERTS} experts"
            )


def stored_experts(
    prefix: str, layers: Mapping[str, StoredLayer], experts: int
) -> dict[tuple[int, str], tuple[str, StoredLayer]]:
    """Expert and w1, w3 or w2 -> name of the stored Linear and what is stored.

    Raises CheckpointError where experts are called otherwise, some are in floating point, or they differ.
    """
    own = {name for name in layers if name.startswith(f"{prefix}.")}
    candidates = [
        {(expert, place): f"{prefix}.{expert}.{name}" for expert in range(experts) for place, name in names.items()}
        for names in _HUB_NAMES
    ]
    found = next((names for names in candidates if own <= set(names.values())), None)
    if found is None:
        raise CheckpointError(
            f"{min(own)}: is the quantized Linear of an expert, and its name is none of gate_proj, up_proj, down_proj "
            "or w1, w2, w3; this model's experts are not served, use transformers"
        )
    for name in found.values():
        if name not in own:
            raise CheckpointError(
                f"{name}: is in floating point beside quantized experts, and vLLM runs all as one; quantize all or none"
            )
    for places in _PRODUCTS.values():
        names = [name for (_, place), name in found.items() if place in places]
        spec = layers[names[0]].spec
        for name in names:
            if not isinstance(layers[name].spec, BcqSpec):
                raise CheckpointError(
                    f"{name}: an expert in the format {format_name(layers[name].spec)}; vLLM runs all experts at once, "
                    "which only bcq has a kernel for; quantize experts by bcq, rtn, gptq or hqq"
                )
            if layers[name].spec.rotate_inputs:
                raise CheckpointError(
                    f"{name}: an expert whose inputs are rotated; vLLM runs all experts at once, which no kernel "
                    "rotates for; quantize experts with rotate_inputs=false"
                )
            if layers[name].spec != spec:
                raise CheckpointError(
                    f"{name}: {layers[name].spec} beside {names[0]}: {spec}; vLLM runs the experts of a block as one, "
                    "so they need one setting"
                )
    return {place: (name, layers[name]) for place, name in found.items()}


def _refuse(prefix: str, moe: Any) -> None:
    """Raise CheckpointError for what bcq_experts does not compute, or vLLM would not hand it."""
    if moe.has_bias or moe.activation.value not in _GATES:
        raise CheckpointError(
            f"{prefix}: experts with a bias or the activation {moe.activation.value} are not served; use transformers"
        )
    if moe.is_lora_enabled:
        raise CheckpointError(f"{prefix}: LoRA adapters beside quantized experts are not served; merge the adapter")


def _tiled(parts: list[Part]) -> BcqTiles:
    """The prepared weight of one expert's Linears of one input, whose canonical tensors are given up."""
    spec, in_features = parts[0].spec, parts[0].kept_shape[1]
    whole = join(spec, [part.held or {} for part in parts], in_features)
    assert whole is not None  # all of bcq's tensors grow with N
    for part in parts:
        part.held = None
    return tile(BcqTensors.of(whole), in_features, spec.group_size)
