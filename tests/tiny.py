"""Tiny random models with a real tokenizer, one per supported family, saved as Hugging Face folders."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BloomConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3nTextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
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

_FOUR_LAYERS = {**_SMALL, "num_hidden_layers": 4, "pad_token_id": 1}
_TWO_KINDS = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Longer than the language model's stack of blocks, which must be found all the same.
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}

HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(
        **_FOUR_LAYERS,
        **_TWO_OF_FOUR_QWEN,
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "lfm2": Lfm2Config(**_FOUR_LAYERS, layer_types=["conv", "full_attention", "conv", "conv"]),
    "mamba": MambaConfig(
        hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4, bos_token_id=0, eos_token_id=0
    ),
    "recurrent_gemma": RecurrentGemmaConfig(
        **{**_FOUR_LAYERS, "intermediate_size": 192}, lru_width=64, attention_window_size=16
    ),
    "jamba": JambaConfig(
        **_FOUR_LAYERS,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
}
SEEING: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**_FOUR_LAYERS, **_TWO_KINDS},
        vision_config={**_VISION, "num_hidden_layers": 6},
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={
            **_FOUR_LAYERS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 6,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "patch_size": 14,
        },
        image_token_id=300,
        video_token_id=301,
        vision_start_token_id=302,
        vision_end_token_id=303,
    ),
}
GEMMA3N = Gemma3nTextConfig(
    **_FOUR_LAYERS,
    **_TWO_KINDS,
    vocab_size_per_layer_input=VOCABULARY,
    hidden_size_per_layer_input=16,
    num_kv_shared_layers=0,
    laurel_rank=4,
    activation_sparsity_pattern=[0.0] * 4,
)
_ALL = CONFIGS | EXPERTS | HYBRIDS | SEEING | {"gemma3n": GEMMA3N}


def build_model(family: str) -> PreTrainedModel:
    """A random model of the family, in fp32."""
    return build(_ALL[family])


def build(config: PretrainedConfig) -> PreTrainedModel:
    """The same for any config."""
    sees = type(config) in map(type, SEEING.values())
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_config(copy.deepcopy(config), dtype=torch.float32)


def sample_text(words: int = 6000, seed: int = 0) -> str:
    """Seeded English-looking text, a sentence a line."""
    generator = random.Random(seed)
    lines = [" ".join(generator.choices(_WORDS, k=12)) + "." for _ in range(words // 12)]
    return "\n".join(lines)


def save_tiny_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the family and a byte-level tokenizer trained on sample_text to ``folder``."""
    return save_model(_ALL[family], folder, seed)


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0, chat_template: str | None = None) -> Path:
    """The same for any config of VOCABULARY tokens."""
    torch.manual_seed(seed)
    model = build(config)
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
