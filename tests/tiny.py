"""Tiny random models with a real tokenizer, one per supported family, saved as Hugging Face folders."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

VOCABULARY = 320
POSITIONS = 256

_WORDS = (
    *("the", "model", "reads", "a", "line", "of", "text", "and", "then", "says"),
    *("what", "it", "thinks", "of", "every", "word", "that", "came", "before", "it"),
)

CONFIGS: dict[str, PretrainedConfig] = {
    # 72 is no multiple of 64: the last group of a g = 64 row is shorter.
    "llama": LlamaConfig(
        hidden_size=72,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=18,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    ),
    "opt": OPTConfig(
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    ),
    "bloom": BloomConfig(
        hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, seq_length=POSITIONS, bos_token_id=0, eos_token_id=0
    ),
    "gpt2": GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    ),
}


def sample_text(words: int = 6000, seed: int = 0) -> str:
    """Seeded English-looking text, a sentence a line."""
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(_WORDS, k=12)) + "." for _ in range(words // 12)]
    return "\n".join(lines)


def save_tiny_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the family and a byte-level tokenizer trained on sample_text to ``folder``."""
    return save_model(CONFIGS[family], folder, seed)


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0, chat_template: str | None = None) -> Path:
    """The same for any config of VOCABULARY tokens."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample_text()], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>", model_max_length=POSITIONS
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder
