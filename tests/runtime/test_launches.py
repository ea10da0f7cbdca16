"""What a block of a prompt or of one token launches on a GPU, and in which order, told by stand-ins of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantkit.nn import bcq_linear
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq.arranged import ArrangedInput, InputOrder
from quantkit.ops.bcq.op import bcq_linear_with_epilogue
from quantkit.ops.decode.launch import Token
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue
from quantkit.runtime import decoder_block, fused_attention, norms
from quantkit.runtime.generation import Runner, fused_runner, next_logits, start
from tests.runtime.test_decoder_block import COVERED, model_of
from tests.runtime.test_merged_linears import packed

RTOL = 1e-4  # fp32 sums in other orders, two blocks
VIEWS = ("view", "_unsafe_view", "transpose", "t", "unsqueeze", "split", "split_with_sizes", "unbind", "slice")
NAMES_ONLY = ("detach", "alias")


class Launches(TorchDispatchMode):
    """Names of stand-ins and of torch's ops that are no views, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in (*VIEWS, *NAMES_ONLY):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, noted as one launch."""

        def run(*args: Any, **options: Any) -> Any:
            self.names.append(name)
            with _disable_current_modes():
                return function(*args, **options)

        return run


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centered: bool) -> Tensor:
    shape = x.shape[-1:]
    return layer_norm(x, shape, weight, bias, epsilon) if centered else rms_norm(x, shape, weight, epsilon)


def add_norm(x: Tensor, addend: Tensor, parameters: Any, epsilon: float, *, centered: bool) -> tuple[Tensor, Tensor]:
    return x + addend, norm(x + addend, *parameters, epsilon, centered=centered)


def attention(
    q: Tensor, token: Token, cache: tuple[Tensor, Tensor], mask: Tensor, scale: float, query_scale: float = 1.0
) -> Tensor:
    """As the op's docstring says it; q and the token must be as the kernel reads them."""
    (keys, values), key, q = cache, token.key, q * query_scale
    assert all(part.is_contiguous() for part in (keys, values))
    for part in (q, token.key, token.value):
        assert part[0].is_contiguous()  # sequences may stand apart
    assert mask.shape == (1, 1, 1, keys.shape[2])
    assert token.position.shape == (1,)
    if token.rotary is not None:
        q, key = apply_rotary_pos_emb(q, key, *token.rotary)
    keys.index_copy_(2, token.position, key)
    values.index_copy_(2, token.position, token.value)
    wide = [part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (keys, values)]
    scores = (q @ wide[0].mT * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ wide[1]).transpose(1, 2).contiguous()


def place_prompt(heads: tuple[Tensor, ...], rotary: Any, cache: tuple[Tensor, Tensor], query_scale: Any) -> Tensor:
    """Likewise."""
    q, k, v = heads
    q = q if query_scale is None else q * query_scale
    if rotary is not None:
        q, k = apply_rotary_pos_emb(q, k, *rotary)
    for stored, new in zip(cache, (k, v), strict=True):
        stored[:, :, : new.shape[2]] = new
    return q


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].apply(gate) * up


def in_order(x: Tensor, order: InputOrder) -> ArrangedInput:
    """x behind the place where its elements are not read, which holds none that are numbers."""
    return ArrangedInput(torch.full_like(x, torch.nan), order, x)


def arranged_norm(x: Tensor, parameters: Any, epsilon: float, order: InputOrder, *, centered: bool) -> ArrangedInput:
    return in_order(norm(x, *parameters, epsilon, centered=centered), order)


def arranged_gated(gate: Tensor, up: Tensor, activation: str, order: InputOrder) -> ArrangedInput:
    return in_order(gated(gate, up, activation), order)


def arranged_product(op: Any, rows: ArrangedInput, epilogue: Epilogue) -> Tensor:
    assert rows.order == order_of_prompts(op, epilogue)
    assert op.x is rows.like
    return bcq_linear_with_epilogue(op._replace(x=rows.memory), epilogue)


def order_of_prompts(op: Any, _epilogue: Epilogue) -> InputOrder | None:
    """Of several tokens, one that hangs on the product."""
    return InputOrder(3, op.x.shape[1], op.x.nbytes + op.out_features) if op.x.shape[1] > 1 else None


@contextmanager
def stand_ins(monkeypatch: pytest.MonkeyPatch, *, ordered: bool = False) -> Iterator[list[list[str]]]:
    """Inside, blocks think that they are on a GPU; yields what each of them launches. ordered: whether the products of
    prompts read rows in an order of their own."""
    launches, seen = Launches(), list[list[str]]()
    run = decoder_block.FusedBlock.forward

    def forward(*args: Any, **options: Any) -> Tensor:
        launches.names.clear()
        with launches:
            result = run(*args, **options)
        seen.append(list(launches.names))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(decoder_block.FusedBlock, "forward", forward)
        for module, name in (
            (fused_attention, "can_attend"),
            (fused_attention, "can_place"),
            (decoder_block, "can_gate"),
        ):
            patch.setattr(module, name, lambda *_: True)
        patch.setattr(norms, "can_norm", lambda x: True)
        patch.setattr(norms, "norm", launches.named("norm", norm))
        patch.setattr(norms, "add_norm", launches.named("add_norm", add_norm))
        patch.setattr(fused_attention, "attention", launches.named("attention", attention))
        patch.setattr(fused_attention, "place_prompt", launches.named("place", place_prompt))
        of_torch = launches.named("torch's attention", fused_attention.sdpa_attention_forward)
        patch.setattr(fused_attention, "sdpa_attention_forward", of_torch)
        patch.setattr(decoder_block, "gated", launches.named("gated", gated))
        products = {name: launches.named(name, bcq_linear.bcq_linear_with_epilogue) for name in (PACKED, EPILOGUE)}
        patch.setattr(
            bcq_linear,
            "bcq_linear_with_epilogue",
            lambda op, epilogue: products[PACKED if epilogue is NO_EPILOGUE else EPILOGUE](op, epilogue),
        )
        if ordered:
            of_rows = launches.named(IN_ORDER, arranged_product)
            patch.setattr(bcq_linear, "bcq_input_order", order_of_prompts)
            patch.setattr(bcq_linear, "arranged_product", of_rows)
            patch.setattr(norms, "arranged_norm", launches.named("norm in order", arranged_norm))
            patch.setattr(decoder_block, "arranged_gated", launches.named("gated in order", arranged_gated))
        yield seen


PACKED, PLAIN, BIASED, EPILOGUE = "product", "mm", "addmm", "product with epilogue"
IN_ORDER = "product of rows in order"
GATED_BLOCK = ["norm", PACKED, "attention", EPILOGUE, "norm", PACKED, "gated", EPILOGUE]
SEQUENCES = {
    ("mistral", "bcq-w3-g32"): GATED_BLOCK,
    ("qwen2", "bcq-w3-g32"): GATED_BLOCK,
    ("qwen3", "bcq-w3-g32"): ["norm", PACKED, "norm", "norm", *GATED_BLOCK[2:]],
    ("opt", "bcq-w3-g32"): ["norm", PACKED, "attention", EPILOGUE, "norm", EPILOGUE, EPILOGUE],
    ("llama", None): ["norm", PLAIN, "attention", PLAIN, "add_norm", PLAIN, "gated", PLAIN, "add"],
    ("opt", None): ["norm", BIASED, "attention", BIASED, "add_norm", BIASED, "relu", BIASED, "add"],
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("family", "method"), SEQUENCES, ids=lambda value: value or "float")
def test_a_block_launches_these_kernels_and_no_others(
    family: str, method: str | None, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(COVERED[family])
    if method is not None:
        packed(model, method)
    ids = torch.randint(5, 50, (batch, 9))
    plain = start(model, ids, 32, runner=Runner(model))
    expected = next_logits(plain)
    with stand_ins(monkeypatch) as launched:
        fast = start(model, ids, 32, runner=fused_runner(model))
        torch.testing.assert_close(next_logits(fast), expected, rtol=RTOL, atol=RTOL)
    sequence = SEQUENCES[family, method]
    place = sequence.index("attention")
    of_prompts = [*sequence[:place], "place", "torch's attention", *sequence[place + 1 :]]
    first = [*of_prompts[:place], "zeros", *of_prompts[place:]]  # the cache of all blocks
    assert launched == [first, of_prompts, sequence, sequence]
    for own, other in zip(fast.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, rtol=RTOL, atol=RTOL)
        torch.testing.assert_close(own.values, other.values, rtol=RTOL, atol=RTOL)


GATED_PROMPT = ["norm in order", IN_ORDER, "place", "torch's attention", EPILOGUE, "norm in order", IN_ORDER]
PROMPTS = {
    "mistral": [*GATED_PROMPT, "gated in order", IN_ORDER],
    "opt": [*GATED_PROMPT, EPILOGUE],
}


@pytest.mark.parametrize("family", PROMPTS)
def test_the_kernels_of_prompts_write_the_order_of_the_products_behind_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(COVERED[family])
    packed(model, "bcq-w3-g32")
    ids = torch.randint(5, 50, (2, 9))
    expected = next_logits(start(model, ids, 32, runner=Runner(model)))
    with stand_ins(monkeypatch, ordered=True) as launched:
        fast = start(model, ids, 32, runner=fused_runner(model))
        torch.testing.assert_close(next_logits(fast), expected, rtol=RTOL, atol=RTOL)
    assert launched[1] == PROMPTS[family]
    assert launched[2:] == [SEQUENCES[family, "bcq-w3-g32"]] * 2
