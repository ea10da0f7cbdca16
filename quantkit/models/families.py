"""Model families as table rows, with a structural fallback: everything that is known of an architecture.

A row says where the decoder blocks and their Linears are, what feeds what, what a block computes, how positions are
given and how sizes make a model. The types of a row are in models/family.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantkit.errors import ModelError
from quantkit.models.experts import is_fused, routers
from quantkit.models.family import Attention, Chain, Family, Feed, NormKind, ResidualBlock, Sizes
from quantkit.models.structure import LEFT_ALONE, block_stacks, is_linear, language_model, submodule


def _every_head_has_its_key(config: Any) -> bool:
    return config.num_key_value_heads == config.num_attention_heads


def _norm_comes_first(config: Any) -> bool:
    return config.do_layer_norm_before and config.layer_norm_elementwise_affine


def _activation_is_relu(config: Any) -> bool:
    return config.activation_function == "relu"


def _attends_to_itself_as_usual(config: Any) -> bool:
    return not (config.add_cross_attention or config.reorder_and_upcast_attn)


def _residual_skips_the_norm(config: Any) -> bool:
    return not config.apply_residual_connection_post_layernorm


def _multiplies_in_one_piece(config: Any) -> bool:
    return not (config.pretraining_tp > 1 and config.slow_but_exact)


def _is_layer_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm  # subclasses, such as Nemotron's, compute something else


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


NORMS: tuple[NormKind, ...] = (
    NormKind(_is_layer_norm, "eps", centered=True),
    NormKind(_is_rms_norm, "variance_epsilon", centered=False),
)

_LLAMA_BLOCK = ResidualBlock(
    classes=("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"),
    norms=("input_layernorm", "post_attention_layernorm"),
    attention=Attention(
        module="self_attn",
        inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        rotary=True,
    ),
    gate="mlp.gate_proj",
    source="mlp.up_proj",
    activation="mlp.act_fn",
    target="mlp.down_proj",
)
_LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2"),
    blocks="model.layers",
    feeds=(
        Feed("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Feed("self_attn.v_proj", ("self_attn.o_proj",), exact=_every_head_has_its_key),
        Feed("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        Feed("mlp.up_proj", ("mlp.down_proj",)),
    ),
    block=_LLAMA_BLOCK,
    last_norm="model.norm",
    sizes=Sizes(
        config_class="LlamaConfig",
        config={
            "hidden_size": "hidden",
            "intermediate_size": "ffn",
            "num_hidden_layers": "layers",
            "num_attention_heads": "heads",
            "num_key_value_heads": "kv_heads",
            "vocab_size": "vocabulary",
            "max_position_embeddings": "positions",
            "tie_word_embeddings": "tied",
        },
        linears=(
            ("q_proj, o_proj", "hidden", "hidden"),
            ("k_proj, v_proj", "kv_hidden", "hidden"),
            ("gate_proj, up_proj", "ffn", "hidden"),
            ("down_proj", "hidden", "ffn"),
        ),
    ),
)
_QWEN3_ATTENTION = replace(_LLAMA_BLOCK.attention, head_norms=("self_attn.q_norm", "self_attn.k_norm"))

FAMILIES: tuple[Family, ...] = (
    _LLAMA,
    replace(
        _LLAMA,
        name="qwen3",
        model_types=("qwen3",),
        block=replace(_LLAMA_BLOCK, classes=("Qwen3DecoderLayer",), attention=_QWEN3_ATTENTION),
        sizes=None,
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
            attention=Attention(
                module="self_attn",
                inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                output="self_attn.out_proj",
                scales_query=True,
            ),
            source="fc1",
            activation="activation_fn",
            target="fc2",
            exact=_norm_comes_first,
        ),
        last_norm="model.decoder.final_layer_norm",
        sizes=Sizes(
            config_class="OPTConfig",
            config={
                "hidden_size": "hidden",
                "word_embed_proj_dim": "hidden",
                "ffn_dim": "ffn",
                "num_hidden_layers": "layers",
                "num_attention_heads": "heads",
                "vocab_size": "vocabulary",
                "max_position_embeddings": "positions",
                "tie_word_embeddings": "tied",
            },
            linears=(
                ("q, k, v, out_proj", "hidden", "hidden"),
                ("fc1", "ffn", "hidden"),
                ("fc2", "hidden", "ffn"),
            ),
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
        last_norm="transformer.ln_f",
        alibi=True,
        sizes=Sizes(
            config_class="BloomConfig",  # four times as wide between, no limit of positions
            config={
                "hidden_size": "hidden",
                "n_layer": "layers",
                "n_head": "heads",
                "vocab_size": "vocabulary",
                "tie_word_embeddings": "tied",
            },
            linears=(
                ("query_key_value", "qkv_hidden", "hidden"),
                ("dense", "hidden", "hidden"),
                ("dense_h_to_4h", "ffn", "hidden"),
                ("dense_4h_to_h", "hidden", "ffn"),
            ),
        ),
    ),
    Family(
        name="gpt2",
        model_types=("gpt2",),
        blocks="transformer.h",
        feeds=(Feed("ln_1", ("attn.c_attn",)), Feed("ln_2", ("mlp.c_fc",))),
        chains=(Chain("mlp.c_fc", "mlp.act", "mlp.c_proj"),),
        block=ResidualBlock(
            classes=("GPT2Block",),
            norms=("ln_1", "ln_2"),
            attention=Attention(module="attn", inputs=("attn.c_attn",), output="attn.c_proj"),
            source="mlp.c_fc",
            activation="mlp.act",
            target="mlp.c_proj",
            exact=_attends_to_itself_as_usual,
        ),
        last_norm="transformer.ln_f",
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


def norm_kind(module: nn.Module) -> NormKind | None:
    """The row of NORMS that the module is of, or None."""
    return next((kind for kind in NORMS if kind.describes(module)), None)


def known_family(model: nn.Module) -> Family | None:
    """The row of FAMILIES for this model's type, or None."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def uses_alibi(model: nn.Module) -> bool:
    """Whether positions come from a bias made of the two-dimensional mask; Falcon's config says it model by model."""
    family = known_family(model)
    return (family is not None and family.alibi) or getattr(getattr(model, "config", None), "alibi", False) is True


def family_named(name: str) -> Family:
    """The row of FAMILIES of that name, which is in the table."""
    return next(family for family in FAMILIES if family.name == name)


def family_of(model: nn.Module) -> Family:
    """The row of FAMILIES for this model, or one found by structure (without feeds).

    Structure: the longest ModuleList of like blocks that hold Linears, in the language model where there are others.
    Raises ModelError listing what is supported where there is none.
    """
    known = known_family(model)
    if known is not None and submodule(model, known.blocks) is not None:
        return known
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    path, language = language_model(model)
    found = [(len(stack), f"{path}.{name}" if path else name) for name, stack in block_stacks(language)]
    if not found:
        types = ", ".join(name for family in FAMILIES for name in family.model_types)
        raise ModelError(
            f"{type(model).__name__} (model type {model_type}): no stack of decoder blocks with Linears found; "
            f"supported: {types}, and models built as one ModuleList of equal blocks"
        )
    # max() keeps the first of equally long stacks: the outermost, as named_modules() walks from the root.
    return Family(name=str(model_type), model_types=(), blocks=max(found, key=lambda item: item[0])[1])


def decoder_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(module name, block) of every decoder block, in order.

    Raises ModelError as family_of does.
    """
    path = family_of(model).blocks
    stack = submodule(model, path)
    assert isinstance(stack, nn.ModuleList)
    return [(f"{path}.{index}", block) for index, block in enumerate(stack)]


def block_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every Linear and Conv1D inside the decoder blocks by full module name, block after block.

    Within a block the order is that of the module's definition. Routers, those of LEFT_ALONE and subclasses of Linear
    that compute something else are none of them: they stay in floating point.
    Raises ModelError for fused experts, which separate_experts takes apart: they would be skipped silently.
    """
    linears: dict[str, nn.Module] = {}
    left = routers(model)
    for prefix, block in decoder_blocks(model):
        for name, module in block.named_modules(prefix=prefix):
            if is_linear(module) and name not in left and name.rpartition(".")[2] not in LEFT_ALONE:
                linears[name] = module
            elif is_fused(module):
                raise ModelError(f"{name}: its experts are fused in 3-D weights; separate them first")
    return linears


def merged_linears(model: nn.Module) -> list[tuple[str, ...]]:
    """Full names of the Linears of each block that read one input (q, k, v; gate, up): engines run them as one product.

    Empty for an architecture whose blocks no row describes.
    """
    row = family_of(model).block
    if row is None:
        return []
    ffn = (row.source,) if row.gate is None else (row.gate, row.source)
    groups = [group for group in (row.attention.inputs, ffn) if len(group) > 1]
    return [tuple(f"{prefix}.{name}" for name in group) for prefix, _ in decoder_blocks(model) for group in groups]


def feeds_of(model: nn.Module) -> list[Feed]:
    """The feeds that hold exactly for this model; the names are relative to each decoder block."""
    config = getattr(model, "config", None)
    return [feed for feed in family_of(model).feeds if feed.exact(config)]


def chains_of(model: nn.Module) -> list[tuple[nn.Module, Chain]]:
    """Every decoder block with each chain that holds exactly for this model, quantized or not.

    Empty for an architecture without a row in FAMILIES: that a module calls its Linears so cannot be told by structure.
    """
    config, prefix = getattr(model, "config", None), getattr(model, "base_model_prefix", "")
    family = known_family(model)
    if family is None:
        return []
    # AutoModel has no "model." in front of its blocks.
    stacks = (submodule(model, path) for path in (family.blocks, family.blocks.removeprefix(f"{prefix}.")))
    stack = next((stack for stack in stacks if isinstance(stack, nn.ModuleList)), ())
    return [(block, chain) for block in stack for chain in family.chains if chain.exact(config)]


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
    out_features, in_features = linear_weight(module).shape
    return out_features, in_features
