"""Tiny random models with a real tokenizer, one per supported family, saved as Hugging Face folders."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
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

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TWO_OF_FOUR_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

EXPERTS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**_SMALL, **_TWO_OF_FOUR),
    "qwen2_moe": Qwen2MoeConfig(
        **_SMALL, **_TWO_OF_FOUR_QWEN, shared_expert_intermediate_size=64, decoder_sparse_step=1
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SMALL, **_TWO_OF_FOUR_QWEN, head_dim=16),
    "olmoe": OlmoeConfig(**_SMALL, num_experts=4, num_experts_per_tok=2),
    "phimoe": PhimoeConfig(**_SMALL, **_TWO_OF_FOUR),
    "deepseek_v3": DeepseekV3Config(
        **{**_SMALL, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": GptOssConfig(**_SMALL, **_TWO_OF_FOUR, head_dim=16),
    "llama4": Llama4TextConfig(
        **_SMALL, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1
    ),
}


def sample_text(words: int = 6000, seed: int = 0) -> str:
    """Seeded English-looking text, a sentence a line."""
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(_WORDS, k=12)) + "." for _ in range(words // 12)]
    return "\n".join(lines)


def save_tiny_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the family and a byte-level tokenizer trained on sample_text to ``folder``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | EXPERTS)[family], dtype=torch.float32)
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
    fast.save_pretrained(folder)
    return folder
