"""Checkpoints through vLLM itself, on the CPU: transformers' tokens, two ranks, the server; see make test-vllm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, MixtralConfig, OPTConfig, Qwen3MoeConfig

import quantkit
from quantkit.calibration.artifact import save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import Corpus
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.demo import DEMO_MODEL
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.recipe import load_recipe, parse_recipe
from tests.serving.tokens import NEW_TOKENS
from tests.tiny import POSITIONS, VOCABULARY, sample_text, save_model

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm has its own environment")

PROMPTS = [[5, 40, 100, 7, 22], [60, 61, 62], [300, 10, 20, 30, 40, 50, 60]]
TEXTS = ["The capital of France is", "Water boils at", "Once upon a time"]
START_SECONDS = 300
CORES = os.cpu_count() or 1
RANK = 8
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# vLLM's attention on a CPU takes heads of 32; four of them, two of k and v
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, intermediate_size=256)
OPT = OPTConfig(
    hidden_size=128,
    ffn_dim=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=POSITIONS,
    word_embed_proj_dim=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=1,
)
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2)
QWEN_MOE = Qwen3MoeConfig(
    **SIZES, head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False
)
MODELS = {"llama": LLAMA, "opt": OPT, "mixtral": MIXTRAL, "qwen-moe": QWEN_MOE}
BCQ = {"schema": 1, "method": "bcq", "settings": {"weight_bits": 4, "group_size": 64}}
RTN = {"schema": 1, "method": "rtn", "settings": {"weight_bits": 4, "group_size": 64}}
HEAD = {**RTN, "keep": [], "head_bits": 6}
FLATTEN = {"schema": 1, "method": "flatten", "settings": {"bits": 8}}
ROW_SCALES = {**FLATTEN, "settings": {"bits": 8, "row_scales": True}}
ROTATED = {**FLATTEN, "settings": {"bits": 8, "rotate": "online"}}
TRELLIS = {
    "schema": 1,
    "method": "trellis",
    "settings": {"weight_bits": 2, "taps": 4, "compensate": False, "rotate_inputs": True},
}
EXPERTS = {**RTN, "layers": [{"match": "*.down_proj", "weight_bits": 3, "group_size": 32}]}
MIXED = {
    **RTN,
    "keep": ["lm_head", "*.1.mlp.gate_proj"],
    "layers": [
        {"match": "*.k_proj", "weight_bits": 3, "group_size": 32},
        {"match": "*.0.self_attn.v_proj", "weight_bits": 2, "group_size": -1},
        {"match": "*.0.mlp.down_proj", "method": "bipolar", "weight_bits": 4, "act_bits": 16},
    ],
}
# None with a range per token: sums in another order then change codes, and tokens that are nearly as probable.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], bool]] = {  # family, recipe, whether it needs calibration
    "llama": ("llama", BCQ, False),
    "opt": ("opt", BCQ, False),
    "mixed": ("llama", MIXED, False),
    "flatten": ("llama", FLATTEN, True),
    "flatten-row-scales": ("llama", ROW_SCALES, True),
    "flatten-rotated": ("llama", ROTATED, True),
    "head": ("llama", HEAD, False),
    "trellis": ("llama", TRELLIS, False),
    "mixtral": ("mixtral", BCQ, False),
    "qwen-moe": ("qwen-moe", EXPERTS, False),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, by what they hold."""
    root = tmp_path_factory.mktemp("checkpoints")
    sources = {name: save_model(config, root / name, chat_template=CHAT) for name, config in MODELS.items()}
    loaded, tokenizer = load_model(str(sources["llama"]))
    text = Corpus("sample", (sample_text(),))
    stream = in_memory_stream(loaded)
    save_calibration(calibrate(stream, tokenizer, text, name="llama", windows=4, seq_len=64, seed=0), root / "c")
    made = {}
    for name, (family, recipe, calibrated) in CHECKPOINTS.items():
        made[name] = root / f"quantized-{name}"
        parsed = parse_recipe(recipe, name=name, where=name)
        calibration = root / "c" if calibrated else None
        quantize_model(
            str(sources[family]), parsed, made[name], calibration=calibration, options=QuantizeOptions("cpu")
        )
    return made


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache), **more}


def engine(
    folder: Path,
    out: Path,
    ranks: int = 1,
    *,
    load_format: str = "auto",
    mode: str = "eager",
    adapter: str = "none",
    prompts: list[list[int]] = PROMPTS,
    **more: str,
) -> Any:
    options = [str(folder), str(ranks), load_format, mode, adapter, json.dumps(prompts)]
    command = [sys.executable, "-m", "tests.serving.tokens", *options]
    more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if ranks == 1 else {}
    return subprocess.run(
        [*command, str(out)], env=environment(out.parent, **more), capture_output=True, text=True, check=False
    )


def served_tokens(folder: Path, out: Path, ranks: int = 1, **more: Any) -> list[list[int]]:
    done = engine(folder, out, ranks, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[list[int]] = json.loads(out.read_text())
    return answers


def expected_tokens(folder: Path) -> list[list[int]]:
    return transformers_tokens(quantkit.load(str(folder), dtype=torch.float32))


def transformers_tokens(model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_transformers(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    assert served_tokens(folders[name], tmp_path / "out.json") == expected_tokens(folders[name])


def test_a_real_model_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    quantize_model(DEMO_MODEL, load_recipe("rtn-w4-g128"), folder, calibration=None, options=QuantizeOptions("cpu"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    served = served_tokens(folder, tmp_path / "out.json", prompts=prompts)
    assert served == transformers_tokens(quantkit.load(str(folder), dtype=torch.float32), prompts)
    assert "Paris" in tokenizer.decode(served[0])


def test_a_compiled_model_gives_the_same_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    assert served_tokens(folders["mixed"], tmp_path / "out.json", mode="compiled") == expected_tokens(folders["mixed"])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(
            ("llama", 2),
            ("mixed", 2),
            ("flatten", 2),
            ("flatten-row-scales", 2),
            ("head", 2),
            ("mixtral", 2),
            ("qwen-moe", 2),
        ),
        *(("llama", 4), ("head", 4), ("mixtral", 4)),
    ],
)
def test_several_ranks_give_the_same_tokens(name: str, ranks: int, folders: dict[str, Path], tmp_path: Path) -> None:
    # vLLM wants a NUMA node for each rank otherwise
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % CORES) for rank in range(ranks))}
    assert served_tokens(folders[name], tmp_path / "out.json", ranks, **cores) == expected_tokens(folders[name])


def test_a_lora_adapter_adds_to_quantized_linears(folders: dict[str, Path], tmp_path: Path) -> None:
    model: Any = quantkit.load(str(folders["mixed"]), dtype=torch.float32)
    tensors = {}
    for name in ("q_proj", "v_proj"):
        for index, layer in enumerate(model.model.layers):
            linear = getattr(layer.self_attn, name)
            down = torch.randn(RANK, linear.in_features) / linear.in_features**0.5
            up = torch.randn(linear.out_features, RANK)
            linear.register_forward_hook(lambda _m, x, y, down=down, up=up: y + x[0] @ down.T @ up.T)
            prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    served = served_tokens(folders["mixed"], tmp_path / "out.json", adapter=str(adapter))
    assert served == transformers_tokens(model)
    assert served != expected_tokens(folders["mixed"])


def test_dummy_weights_run(folders: dict[str, Path], tmp_path: Path) -> None:
    done = engine(folders["mixed"], tmp_path / "out.json", load_format="dummy")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_damaged_checkpoint_ends_the_engine_by_its_name(folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["opt"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    done = engine(tmp_path, tmp_path / "out.json")
    assert done.returncode != 0
    assert "digest differs" in done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of ``quantkit serve``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quantkit", "serve", str(folders["llama"]), "--port", str(port)]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--served-model-name", "tiny"]
    cache = tmp_path_factory.mktemp("server")
    with (cache / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], env=environment(cache), stdout=log, stderr=log)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address, process, cache / "log")
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def ask(address: str, path: str, **question: Any) -> Any:
    body = json.dumps({"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0, **question}).encode()
    request = urllib.request.Request(f"{address}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_the_server_completes_with_transformers_tokens(server: str, folders: dict[str, Path]) -> None:
    answer = ask(server, "/v1/completions", prompt=PROMPTS[0], ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected_tokens(folders["llama"])[0]


def test_the_server_chats(server: str) -> None:
    answer = ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": "the model"}], ignore_eos=True)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
