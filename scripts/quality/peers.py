"""Perplexity of other toolkits' quantizers, measured by quantkit beside its own: only the quantizer differs.

pip install hqq gptqmodel auto-round
python scripts/quality/peers.py MODEL --text wiki.test.jsonl --calibration c.safetensors
    --peers hqq:4:128,gptq:4:128,autoround:3:128 --seq-len 2048 --max-windows 8 --json docs/results/quality-peers.json

A peer is NAME:BITS:GROUP, or NAME:BITS for exl3, which has no groups, or NAME:TYPE for llama.cpp's types (llamacpp) and
mixtures of types (llamacpp-mix). Its weights are dequantized into a copy of the model, which ``quantkit eval
perplexity`` then reads, and with --divergence ``quantkit eval divergence``, on other texts too. Calibration windows are
those of the quantkit artifact, so that every method has seen the same tokens. Rows already in the JSON file are kept.
GPTQModel needs GPTQMODEL_CPU_WORKERS=2 in the environment on machines of few cores; exl3 needs a GPU; llama.cpp's types
need its program llama-quantize, which its CMake project builds (pip download --no-binary :all: llama-cpp-python has the
sources).
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.calibration.artifact import Calibration, load_calibration
from quantkit.errors import EvaluationError
from quantkit.models.families import block_linears, linear_weight
from scripts.common import chosen, environment_of, markdown_table, read_document, run_script, write_document
from scripts.quality.llamacpp import OPTION
from scripts.quality.peer import Inputs, Setting, loaded_for_peers
from scripts.quality.peer_quantizers import PEERS
from scripts.quality.table import evaluation


def setting_of(text: str) -> Setting:
    """A peer as written on the command line. Raises EvaluationError for what is not NAME:BITS[:GROUP] or NAME:TYPE."""
    name, *sizes = text.split(":")
    if len(sizes) == 1 and sizes[0][:1].isalpha():
        return Setting(name, 0, 0, sizes[0])
    try:
        bits, group_size = float(sizes[0]), int(sizes[1]) if len(sizes) > 1 else 0
    except (ValueError, IndexError):
        raise EvaluationError(f"--peers {text}: expected NAME:BITS:GROUP") from None
    return Setting(name, bits, group_size)


def check(settings: list[Setting], llama_quantize: Path | None) -> None:
    """Raise QuantkitError where a peer is unknown or not installed, or the form of its setting another's."""
    for setting in settings:
        [name] = chosen("--peers", setting.peer, PEERS)
        peer = PEERS[name]
        if importlib.util.find_spec(peer.module) is None:
            raise EvaluationError(f"--peers {name}: {peer.package} is not installed: pip install {peer.package}")
        if peer.form != setting.form:
            raise EvaluationError(f"--peers {name}: expected {name}:{peer.form}")
        if peer.form == "TYPE" and (llama_quantize is None or not llama_quantize.is_file()):
            raise EvaluationError(f"--peers {name}: needs llama.cpp's program; name its file: {OPTION} PATH")


def replaced(loaded: Any, tokenizer: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the model with these weights instead of those of its quantized Linears."""
    layers = block_linears(loaded)
    absent = layers.keys() ^ weights.keys()
    if absent:
        raise EvaluationError(f"{min(absent)}: quantized by one of peer and quantkit only; the two cannot be compared")
    for name, module in layers.items():
        target = linear_weight(module)
        target.data.copy_(weights[name].to(target.device))
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shown_command(options: argparse.Namespace, setting: Setting) -> str:
    """The command of one row as a reader would type it, without this machine's folders."""
    files = ["--text", Path(options.text).name, "--calibration", options.calibration.name, "--peers", setting.label]
    sizes = ["--seq-len", str(options.seq_len), "--max-windows", str(options.max_windows), "--device", options.device]
    more = ["--divergence"] if options.divergence else []
    more += ["--other-texts", *(Path(text).name for text in options.other_texts)] if options.other_texts else []
    more += [OPTION, options.llama_quantize.name] if setting.kind else []
    return " ".join(["python scripts/quality/peers.py", options.name, *files, *sizes, *more])


def measure(
    options: argparse.Namespace, setting: Setting, calibration: Calibration, target: tuple[Any, Any], work: Path
) -> dict[str, Any]:
    """One row: quantize by the peer, then evaluate by quantkit. target: the model whose weights are replaced."""
    peer, folder, score = PEERS[setting.peer], str(work / setting.label.replace(":", "-")), work / "e.json"
    started = time.perf_counter()
    quantized = peer.quantize(Inputs(options.model, calibration, options.device, options.llama_quantize), setting)
    seconds = time.perf_counter() - started
    replaced(*target, quantized.weights, Path(folder))
    row = {
        "model": options.name,
        "peer": setting.label,
        "call": peer.how,
        "calibration_windows": len(calibration.windows),
        "bits_per_weight": quantized.bits_per_weight,
        **quantized.told,
        "seconds": seconds,
        "evaluation": evaluation(["perplexity", folder], score, options),
    }
    if options.divergence:
        row["divergence"] = evaluation(["divergence", options.model, folder], score, options)
    others = [argparse.Namespace(**{**vars(options), "text": text}) for text in options.other_texts]
    if others:
        what = ["divergence", options.model, folder]
        row["other_divergences"] = [evaluation(what, score, other) for other in others]
    environment = environment_of(options.device, peer.package)
    return row | {"command": shown_command(options, setting), "environment": environment}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = []
    for row in rows:
        value = f"{row['evaluation']['perplexity']:.2f} ± {row['evaluation']['stderr']:.2f}"
        kl = f"{row['divergence']['mean_kl']:.4f}" if "divergence" in row else ""
        lines.append([row["model"], row["peer"], f"{row['bits_per_weight']:.2f}", value, kl, f"{row['seconds']:.0f}"])
    return markdown_table(("model", "peer", "bits/weight", "perplexity", "mean KL", "quantize s"), lines, left=2)


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """What tells rows apart; those of before their windows were noted are of 32."""
    return row["model"], row["peer"], row.get("calibration_windows", 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--name", help="how the model is called in the results; by default its folder's name")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="artifact of quantkit calibrate")
    parser.add_argument("--peers", required=True, help="comma-separated NAME:BITS:GROUP, NAME:BITS or NAME:TYPE")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--divergence", action="store_true", help="also KL to the original, on the same text")
    parser.add_argument("--other-texts", nargs="+", default=[], help="KL to the original on these too")
    parser.add_argument(OPTION, type=Path, help="llama.cpp's program, for its types")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.name = options.name or Path(options.model).name
    settings = [setting_of(text) for text in options.peers.split(",")]
    check(settings, options.llama_quantize)
    calibration = load_calibration(options.calibration)
    # Before a peer is imported: GPTQModel changes how transformers makes experts.
    target = loaded_for_peers(options.model, "cpu")
    document = read_document(options.json, {"rows": []})
    done = {key_of(row) for row in document["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            if (options.name, setting.label, len(calibration.windows)) not in done:
                document["rows"].append(measure(options, setting, calibration, target, Path(folder)))
                write_document(options.json, document)
    print(markdown(document["rows"]))


if __name__ == "__main__":
    run_script(main)
