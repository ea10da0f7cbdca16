"""What a row of the family table (models/families.py) says: its types, and the checks that they can make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_TRANSFORMERS = "transformers.models."


def always(_config: Any) -> bool:
    """For what holds whatever a model's config says."""
    return True


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
    exact: Callable[[Any], bool] = always


@dataclass(frozen=True)
class Chain:
    """Two Linears with nothing but an elementwise function between them, called in this order by one module.

    source, activation, target: module names inside a decoder block, children of the same module.
    exact: model config -> whether the statement above holds for this model.
    """

    source: str
    activation: str
    target: str
    exact: Callable[[Any], bool] = always


@dataclass(frozen=True)
class Attention:
    """An attention that is output(softmax(scaling q k^T) v), q, k and v being products of the same input.

    module: has the attributes ``scaling``, a number, ``head_dim``, D below, and ``layer_idx``, the layer of the cache.
    inputs: the Linears that make q, k and v, or the one that makes all three, equally wide, in this order.
    output: the Linear behind the attention.
    head_norms: norms of every head of q and of k, or none. All are module names inside the block.
    rotary: whether q and k are rotated behind their norms by the block's ``position_embeddings``, cosine and sine
    [1, M, D] each: value i of a head with value i + D / 2.
    scales_query: whether q is multiplied by ``scaling``, and rounded, before q k^T instead of the scores behind it.
    """

    module: str
    inputs: tuple[str, ...]
    output: str
    head_norms: tuple[str, ...] = ()
    rotary: bool = False
    scales_query: bool = False


@dataclass(frozen=True)
class ResidualBlock:
    """A decoder block that is h += attention(norm(h)), then h += target(between(norm(h))), and returns h.

    between: activation(source(x)), or activation(gate(x)) * source(x) where there is a gate.
    classes: of transformers, that do nothing else outside training. They are handed ``past_key_values`` and
    ``attention_mask`` by name, or second and third.
    norms, gate, source, activation, target: module names inside the block.
    exact: model config -> whether the statement above holds for this model.
    """

    classes: tuple[str, ...]
    norms: tuple[str, str]
    attention: Attention
    source: str
    activation: str
    target: str
    gate: str | None = None
    exact: Callable[[Any], bool] = always

    def describes(self, block: nn.Module) -> bool:
        """Whether the block is of one of the classes, and not of a stranger's by that name."""
        return type(block).__name__ in self.classes and type(block).__module__.startswith(_TRANSFORMERS)


@dataclass(frozen=True)
class NormKind:
    """A kind of norm over the last dimension with a weight, and a bias where the module has one.

    describes: module -> whether it is of this kind. epsilon: the attribute that holds it. centered: LayerNorm, which
    subtracts the mean, or else RMSNorm.
    """

    describes: Callable[[nn.Module], bool]
    epsilon: str
    centered: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder by its sizes.

    family: the name of a row of FAMILIES that has ``sizes``. kv_heads: heads of k and v. tied: whether the head is the
    embedding. positions: the most tokens, where the family has a limit.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    positions: int = 4096

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_hidden(self) -> int:
        """Width of k and of v."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_hidden(self) -> int:
        """Width of q, k and v together."""
        return self.hidden + 2 * self.kv_hidden


@dataclass(frozen=True)
class Sizes:
    """How the sizes of a model of the family become its config and its Linears; sizes are attributes of ModelShape.

    config_class: of transformers. config: keyword of the config -> size.
    linears: (what they are called together, N, K) of the Linears of a block, N and K being sizes.
    """

    config_class: str
    config: Mapping[str, str]
    linears: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Family:
    """One architecture: ``model_type`` values of its configs, where its blocks are, what feeds its Linears.

    blocks: name of the list of decoder blocks. block: what a block computes, where it can be said so. last_norm: name
    of the norm behind the last block. alibi: whether positions come from a bias made of the two-dimensional mask,
    and no position ids are taken. sizes: for models that are made from a ModelShape.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: str
    feeds: tuple[Feed, ...] = ()
    chains: tuple[Chain, ...] = ()
    block: ResidualBlock | None = None
    last_norm: str | None = None
    alibi: bool = False
    sizes: Sizes | None = None
