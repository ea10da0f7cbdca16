"""Model families as table rows, with a structural fallback: where the decoder blocks and their Linears are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantkit.errors import ModelError

LINEAR_TYPES = (nn.Linear, Conv1D)
_TRANSFORMERS = "transformers.models."


def _always(_config: Any) -> bool:
    return True


def _every_head_has_its_key(config: Any) -> bool:
    return config.num_key_value_heads == config.num_attention_heads


def _norm_comes_first(config: Any) -> bool:
    return config.do_layer_norm_before and config.layer_norm_elementwise_affine


def _activation_is_relu(config: Any) -> bool:
    return config.activation_function == "relu"


def _residual_skips_the_norm(config: Any) -> bool:
    return not config.apply_residual_connection_post_layernorm


def _multiplies_in_one_piece(config: Any) -> bool:
    return not (config.pretraining_tp > 1 and config.slow_but_exact)


@dataclass(frozen=True)
class Feed:
    """A module whose output is the whole input of some Linears, up to something that commutes with a positive scale.

    Dividing output channel j of ``source`` (weight and bias) by s_j > 0 and multiplying input column j of every
    target by s_j leaves the model's function unchanged: what smoothing folds into.

    source, targets: module names inside a decoder block.
    exact: model config -> whether the statement above holds for this model.
    """

    source: str
    targets: tuple[str, ...]
    exact: Callable[[Any], bool] = _always


@dataclass(frozen=True)
class Chain:
    """Two Linears with nothing but an elementwise function between them, called in this order by one module.

    source, activation, target: module names inside a decoder block, children of the same module.
    exact: model config -> whether the statement above holds for this model.
    """

    source: str
    activation: str
    target: str
    exact: Callable[[Any], bool] = _always


@dataclass(frozen=True)
class ResidualBlock:
    """A decoder block that is h += attention(norm(h)), then h += target(between(norm(h))), and returns h.

    between: activation(source(x)), or activation(gate(x)) * source(x) where there is a gate.
    classes: of transformers, that do nothing else outside training and hand their keywords to the attention, which
    returns (y, ...). norms, attention, gate, source, activation, target: module names inside the block.
    output: the Linear that makes y. scales_query: the attention multiplies its query by its attribute ``scaling``.
    rotation: the function (q, k, cosine, sine) of the classes' Python module by which the attention turns query and key
    [B, H, M, D] for their positions, value i with value i + D / 2.
    exact: model config -> whether the statement above holds for this model.
    """

    classes: tuple[str, ...]
    norms: tuple[str, str]
    attention: str
    output: str
    source: str
    activation: str
    target: str
    gate: str | None = None
    scales_query: bool = False
    rotation: str | None = None
    exact: Callable[[Any], bool] = _always

    def describes(self, block: nn.Module) -> bool:
        """Whether the block is of one of the classes, and not of a stranger's by that name."""
        return type(block).__name__ in self.classes and type(block).__module__.startswith(_TRANSFORMERS)


@dataclass(frozen=True)
class Family:
    """One architecture: ``model_type`` values of its configs, where its blocks are, what feeds its Linears."""

    name: str
    model_types: tuple[str, ...]
    blocks: str
    feeds: tuple[Feed, ...] = ()
    chains: tuple[Chain, ...] = ()
    block: ResidualBlock | None = None


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        model_types=("llama", "mistral", "qwen2", "qwen3"),
        blocks="model.layers",
        feeds=(
            Feed("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            Feed("self_attn.v_proj", ("self_attn.o_proj",), exact=_every_head_has_its_key),
            Feed("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            Feed("mlp.up_proj", ("mlp.down_proj",)),
        ),
        block=ResidualBlock(
            classes=("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
            norms=("input_layernorm", "post_attention_layernorm"),
            attention="self_attn",
            output="self_attn.o_proj",
            gate="mlp.gate_proj",
            source="mlp.up_proj",
            activation="mlp.act_fn",
            target="mlp.down_proj",
            rotation="apply_rotary_pos_emb",
        ),
    ),
    Family(
        name="opt",
        model_types=("opt",),
        blocks="model.decoder.layers",
        feeds=(
            Feed(
                "self_attn_layer_norm",
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                exact=_norm_comes_first,
            ),
            Feed("self_attn.v_proj", ("self_attn.out_proj",)),
            Feed("final_layer_norm", ("fc1",), exact=_norm_comes_first),
            Feed("fc1", ("fc2",), exact=_activation_is_relu),
        ),
        chains=(Chain("fc1", "activation_fn", "fc2"),),
        block=ResidualBlock(
            classes=("OPTDecoderLayer",),
            norms=("self_attn_layer_norm", "final_layer_norm"),
            attention="self_attn",
            output="self_attn.out_proj",
            source="fc1",
            activation="activation_fn",
            target="fc2",
            scales_query=True,
            exact=_norm_comes_first,
        ),
    ),
    Family(
        name="bloom",
        model_types=("bloom",),
        blocks="transformer.h",
        feeds=(
            Feed("input_layernorm", ("self_attention.query_key_value",), exact=_residual_skips_the_norm),
            Feed("post_attention_layernorm", ("mlp.dense_h_to_4h",), exact=_residual_skips_the_norm),
        ),
        chains=(Chain("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h", exact=_multiplies_in_one_piece),),
    ),
    Family(
        name="gpt2",
        model_types=("gpt2",),
        blocks="transformer.h",
        feeds=(Feed("ln_1", ("attn.c_attn",)), Feed("ln_2", ("mlp.c_fc",))),
        chains=(Chain("mlp.c_fc", "mlp.act", "mlp.c_proj"),),
    ),
    Family(
        name="gpt_neox",
        model_types=("gpt_neox",),
        blocks="gpt_neox.layers",
        chains=(Chain("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h"),),
    ),
    Family(
        name="phi",
        model_types=("phi",),
        blocks="model.layers",
        chains=(Chain("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),),
    ),
)


def family_of(model: nn.Module) -> Family:
    """The row of FAMILIES for this model, or one found by structure (without feeds).

    Structure: the longest ModuleList of same-class blocks that hold Linears.
    Raises ModelError listing what is supported where there is none.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for family in FAMILIES:
        if model_type in family.model_types and _module(model, family.blocks) is not None:
            return family
    found = [(len(stack), name) for name, stack in _block_stacks(model)]
    if not found:
        known = ", ".join(name for family in FAMILIES for name in family.model_types)
        raise ModelError(
            f"{type(model).__name__} (model type {model_type}): no stack of decoder blocks with Linears found; "
            f"supported: {known}, and models built as one ModuleList of equal blocks"
        )
    # max() keeps the first of equally long stacks: the outermost, as named_modules() walks from the root.
    return Family(name=str(model_type), model_types=(), blocks=max(found, key=lambda item: item[0])[1])


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(module name, block) of every decoder block, in order.

    Raises ModelError as family_of does.
    """
    path = family_of(model).blocks
    stack = _module(model, path)
    assert isinstance(stack, nn.ModuleList)
    return [(f"{path}.{index}", block) for index, block in enumerate(stack)]


def block_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every Linear and Conv1D inside the decoder blocks by full module name, block after block.

    Within a block the order is that of the module's definition.
    Raises ModelError for blocks that hold fused experts (3-D weights): they would be skipped silently.
    """
    linears: dict[str, nn.Module] = {}
    for prefix, block in decoder_blocks(model):
        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, LINEAR_TYPES):
                linears[name] = module
            elif not hasattr(module, "in_features"):
                _refuse_experts(name, module)
    return linears


def feeds_of(model: nn.Module) -> list[Feed]:
    """The feeds that hold exactly for this model; the names are relative to each decoder block."""
    config = getattr(model, "config", None)
    return [feed for feed in family_of(model).feeds if feed.exact(config)]


def chains_of(model: nn.Module) -> list[tuple[nn.Module, Chain]]:
    """Every decoder block with each chain that holds exactly for this model, quantized or not.

    Empty for an architecture without a row in FAMILIES: that a module calls its Linears so cannot be told by structure.
    """
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    rows = (family for family in FAMILIES if getattr(config, "model_type", None) in family.model_types)
    found = []
    for family in rows:
        # AutoModel has no "model." in front of its blocks.
        stacks = (_module(model, path) for path in (family.blocks, family.blocks.removeprefix(f"{prefix}.")))
        stack = next((stack for stack in stacks if isinstance(stack, nn.ModuleList)), ())
        found += [(block, chain) for block in stack for chain in family.chains if chain.exact(config)]
    return found


def model_body(model: nn.Module) -> nn.Module:
    """The model without its language-model head: enough where only the blocks matter."""
    body = getattr(model, "base_model", model)
    assert isinstance(body, nn.Module)
    return body


def linear_weight(module: nn.Module) -> Tensor:
    """The weight as [N, K] (a view; GPT-2's Conv1D stores [K, N])."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight


def linear_bias(module: nn.Module) -> Tensor | None:
    """The bias [N], or None."""
    bias = module.bias
    return bias if isinstance(bias, Tensor) else None


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(N, K) of a Linear or Conv1D."""
    rows, columns = linear_weight(module).shape
    return rows, columns


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _block_stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """ModuleLists whose elements are of one class, composite, and hold Linears."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(block) for block in module}) != 1:
            continue
        if isinstance(module[0], LINEAR_TYPES):
            continue
        if any(isinstance(child, LINEAR_TYPES) for child in module[0].modules()):
            yield name, module


def _refuse_experts(name: str, module: nn.Module) -> None:
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim >= 3:
            raise ModelError(
                f"{name}.{parameter_name}: {parameter.ndim}-D weight {tuple(parameter.shape)} (fused experts or a "
                "convolution) is not supported; only models whose blocks are built of Linears can be quantized"
            )
