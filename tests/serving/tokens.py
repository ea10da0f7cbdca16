"""Greedy tokens of a folder through vLLM's engine, as JSON; a program of its own, as engines end with their process.

python -m tests.serving.tokens FOLDER RANKS LOAD_FORMAT MODE ADAPTER PROMPTS OUT

MODE: eager or compiled. ADAPTER: a folder of LoRA weights, or "none". PROMPTS: JSON, a list of lists of token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NEW_TOKENS = 16


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folder, ranks, load_format, mode, adapter, prompts, out = sys.argv[1:]
    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=mode == "eager",
        load_format=load_format,
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=int(ranks),
        enable_lora=adapter != "none",
    )
    answers = engine.generate(
        [{"prompt_token_ids": ids} for ids in json.loads(prompts)],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        lora_request=None if adapter == "none" else LoRARequest("adapter", 1, adapter),
    )
    Path(out).write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
