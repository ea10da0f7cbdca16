"""A byte-level BPE tokenizer as GGUF's metadata holds it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, refusing

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # gguf.TokenType
_SPECIAL = ("bos", "eos", "unk", "pad")
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"GPT-2": "gpt-2", "Digits": "smollm", _LLAMA_3: "llama-bpe", _LLAMA_3.replace("{1,3}", ""): "qwen2"}
"""What a tokenizer splits text by before its merges -> llama.cpp's name of that."""


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF stores of a tokenizer.

    splits: llama.cpp's name of how text is split. tokens, types: one per row of the embedding. special: bos, eos, unk
    and pad to their tokens' numbers. adds_bos, adds_eos: to every text.
    """

    splits: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special: dict[str, int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer beside a checkpoint with an embedding of ``size`` rows.

    Raises CheckpointError for one that is missing, or that GGUF's byte-level BPE does not describe.
    """
    from transformers import AutoTokenizer

    where = f"tokenizer of {folder}"
    with refusing(f"{where} cannot be read", CheckpointError):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        added = tokenizer("", add_special_tokens=True)["input_ids"]
    model = document["model"]
    splits = _SPLITS.get(_split_by(document["pre_tokenizer"]))
    if model["type"] != "BPE" or splits is None or _falls_back(model) or not _leaves_text(document["normalizer"]):
        raise CheckpointError(
            f"{where}: is no byte-level BPE of a kind that quantkit writes to GGUF ({', '.join(_SPLITS.values())}); "
            "export to compressed-tensors"
        )
    tokens = {index: (token, _NORMAL) for token, index in model["vocab"].items()}
    for entry in document["added_tokens"]:
        tokens[entry["id"]] = (entry["content"], _CONTROL if entry["special"] else _USER_DEFINED)
    if max(tokens) >= size:
        raise CheckpointError(f"{where}: has {max(tokens) + 1} tokens, the model's embedding {size} rows")
    listed = [tokens.get(index, (f"[PAD{index}]", _UNUSED)) for index in range(size)]
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in _SPECIAL}
    template = tokenizer.chat_template
    return Vocabulary(
        splits=splits,
        tokens=tuple(token for token, _ in listed),
        types=tuple(kind for _, kind in listed),
        merges=tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
        special={name: index for name, index in special.items() if index is not None},
        adds_bos=bool(added) and added[0] == special["bos"],
        adds_eos=len(added) > 1 and added[-1] == special["eos"],
        chat_template=template if isinstance(template, str) else None,
    )


def _falls_back(model: Any) -> bool:
    """Whether the vocabulary has tokens for single bytes to fall back on; one of byte-level BPE has none."""
    return bool(model["byte_fallback"]) and any(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))


def _leaves_text(normalizer: Any) -> bool:
    return not normalizer or (normalizer["type"] == "Sequence" and not normalizer["normalizers"])


def _split_by(pre_tokenizer: Any) -> str:
    """The key of _SPLITS; another string for what is not known."""
    steps = pre_tokenizer or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    *first, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(first) > 1:
        return "unknown"
    if not first:
        return "GPT-2" if last["use_regex"] else "unknown"
    if first[0]["type"] == "Digits" and first[0]["individual_digits"] and last["use_regex"]:
        return "Digits"
    if first[0]["type"] == "Split" and first[0]["behavior"] == "Isolated" and not last["use_regex"]:
        return str(first[0]["pattern"].get("Regex"))
    return "unknown"


def write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Add the entries to a gguf.GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
