"""Writes a small checkpoint of every format, from a tiny model and by the command line, and what it gives when loaded.

    python tests/golden/write.py model OUT        # tests/golden/files/model
    python tests/golden/write.py checkpoints tests/golden/files/model OUT

tests/golden/files holds what the quantkit of commit 0f9f81b wrote, in the environment below, which keeps sums in one
order on every x86 processor. Its modules had other names: only the command line and ``quantkit.load`` are used here.
Tokenizers and generation settings are left out of the checkpoints there, and the calibration artifact is compressed.
``trellis`` is whole, as the version that brought its format wrote it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

import quantkit
from quantkit.cli.app import app

ONE_ORDER_OF_SUMS = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
CALIBRATION, EXPECTED, TEXT = "calibration.safetensors", "expected.safetensors", "text.txt"
WORDS = (*("the", "model", "reads", "a", "line", "of", "text", "and", "then", "says", "what", "it", "thinks"), ".")

# flatten-o1 as it was when the files were written
AS_PUBLISHED = (
    *("smoothing=sigmoid", "bound_linears=false", "rotate_inputs=false"),
    *("column_price=0", "cover_vocabulary=false", "longer_text=1"),
    *("row_scales=false", "max_flatten_ratio=1"),
)
# name -> recipe and its settings; rows of 24 columns end in a group of 8
CHECKPOINTS = {
    "bcq": ("bcq-w3-g128", "group_size=16"),
    "bcq-no-offset": ("nuqmm-q3-g128", "group_size=16"),
    "bcq-8-bit-scales": ("bcq-w3-g64-s8", "group_size=16"),
    "bipolar": ("bipolar-w3a4",),
    "flatten-int8": ("flatten-o1", *AS_PUBLISHED),
    "flatten-int4": ("flatten-o1", "bits=4", *AS_PUBLISHED),
    "attention": ("rtn-w4-g128", "group_size=-1", "attention_bits=8"),
    # fc1 has 24 rows, which the format does not take
    "trellis": ("trellis-w2", "taps=4", "sweeps=1", "damping=0.5", "rotate_inputs=false", 'keep=["lm_head", "*.fc1"]'),
}


def write_model(folder: Path) -> None:
    """A one-block OPT whose norms put out two large channels, its word tokenizer, and a text of its words."""
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=16,
        max_position_embeddings=8,
        word_embed_proj_dim=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        init_std=0.2,
    )
    model = OPTForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm.weight"):
            parameter.data[[3, 9]] *= 12.0
    model.half().save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(("</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    chosen = torch.randint(len(WORDS), (60,)).tolist()
    (folder / TEXT).write_text(" ".join(WORDS[index] for index in chosen) + "\n", encoding="utf-8")


def write_checkpoints(model: Path, out: Path) -> None:
    """The calibration artifact, every checkpoint in a folder of its name, and what each gives when loaded."""

    def run(*arguments: str | Path) -> None:
        app([str(argument) for argument in arguments], standalone_mode=False)

    out.mkdir()
    text: tuple[str | Path, ...] = ("--text", model / TEXT, "--windows", "3", "--seq-len", "8")
    run("calibrate", model, *text, "--out", out / CALIBRATION)
    expected: dict[str, Tensor] = {}
    for name, (recipe, *settings) in CHECKPOINTS.items():
        chosen = [part for setting in settings for part in ("--set", setting)]
        command: tuple[str | Path, ...] = (
            "quantize",
            model,
            "--recipe",
            recipe,
            *chosen,
            "--calibration",
            out / CALIBRATION,
        )
        run(*command, "--out", out / name)
        digest, logits = loaded(out / name)
        expected |= {f"{name}.weights": torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)}
        expected |= {f"{name}.logits": logits}
    save_file(expected, out / EXPECTED)


@torch.no_grad()
def loaded(folder: Path) -> tuple[str, Tensor]:
    """What a checkpoint gives when loaded: sha256 of its dequantized weights, fp32 logits [8, 16] of eight tokens."""
    model = quantkit.load(str(folder), dtype=torch.float32)
    digest = hashlib.sha256()
    for name, module in sorted(model.named_modules()):
        if type(module).__name__ == "QuantizedLinear":
            digest.update(name.encode() + module.dequantize().numpy().tobytes())
    logits: Tensor = model(torch.arange(8)[None]).logits[0]
    return digest.hexdigest(), logits.clone()


if __name__ == "__main__":
    if sys.argv[1] == "model":
        write_model(Path(sys.argv[2]))
    else:
        write_checkpoints(Path(sys.argv[2]), Path(sys.argv[3]))
