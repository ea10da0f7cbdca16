"""One setting of scripts/serve_bench.py, measured in a process of its own.

python scripts/serve_measure.py WORK.json, or python -m scripts.serve_measure WORK.json

The file holds a Work, and is overwritten by what was found.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.nvml import open_nvml
from quantkit.errors import BenchError
from scripts.common import run_script

PROMPT, WARM_UP_TOKENS, CHECKED_TOKENS, PROFILED_TOKENS = 32, 9, 8, 24
LONGEST_KERNELS = 12
WEIGHT_DEVIATION, SCALE = 0.02, 0.005  # of drawn weights; a scale of theirs, about: of 4 bits 8 scales and less
# Codes and scales of vLLM's own layers; quantkit's are drawn when they are made up.
PACKED, SCALES = ("weight_packed", "qweight"), ("weight_scale", "scales")
COMMUNICATION = ("nccl", "all_reduce", "allreduce", "cross_device", "all_gather", "multimem")


@dataclass(frozen=True)
class Work:
    """What one process measures.

    firsts: (sequences, tokens of each) of first tokens. profile: kernels as well. lock: descriptor of an open file to
    be held before the GPUs are used. limit: seconds from then on after which the process ends itself.
    """

    folder: str
    options: Mapping[str, Any]
    batches: tuple[int, ...]
    firsts: tuple[tuple[int, int], ...]
    steps: int
    repeats: int
    profile: bool
    lock: int | None = None
    limit: float | None = None


class Energy:
    """NVML's counters of all GPUs together; None where there is none."""

    def __init__(self) -> None:
        self.counters: list[tuple[Any, Any]] = []
        try:
            self.counters = [open_nvml(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        except BenchError as error:
            print(f"no energy: {error}", file=sys.stderr)

    def millijoules(self) -> float | None:
        """Used since the driver was loaded."""
        if not self.counters:
            return None
        return float(sum(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for nvml, handle in self.counters))


class Engine:
    """vLLM's engine on a folder, asked for tokens of made-up prompts."""

    def __init__(self, work: Work):
        from vllm import LLM

        self.work, self.llm = work, LLM(work.folder, **work.options)

    def generate(self, count: int, length: int, tokens: int, **more: Any) -> Sequence[Any]:
        """So many tokens behind each of ``count`` prompts of ``length`` tokens."""
        from vllm import SamplingParams

        prompts: Any = [{"prompt_token_ids": [5 + (7 * n + i) % 1000 for i in range(length)]} for n in range(count)]
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
        return self.llm.generate(prompts, settings, use_tqdm=False)

    def seconds(self, count: int, length: int, tokens: int) -> float:
        """The least time of several calls of ``generate``."""
        return min(self._timed(count, length, tokens) for _ in range(self.work.repeats))

    def _timed(self, *call: int) -> float:
        start = time.perf_counter()
        self.generate(*call)
        return time.perf_counter() - start

    def profiled(self, *call: int) -> list[dict[str, float]]:
        """Of each GPU, the microseconds of every kernel while ``generate`` runs."""
        self.llm.collective_rpc(_start_profile)
        self.generate(*call)
        return list(self.llm.collective_rpc(_stop_profile))


def main() -> None:
    if len(sys.argv) != 2:
        raise BenchError("give the JSON file of one Work; scripts/serve_bench.py writes it")
    path = Path(sys.argv[1])
    work = Work(**json.loads(path.read_text()))
    _wait_for_turn(work)
    path.write_text(json.dumps(measure(work)))


def _wait_for_turn(work: Work) -> None:
    if work.lock is not None:
        import vllm.entrypoints.llm  # noqa: F401  # what takes long and needs no GPU, while others have it

        fcntl.flock(work.lock, fcntl.LOCK_EX)
    if work.limit is not None:
        faulthandler.dump_traceback_later(work.limit, exit=True)


def measure(work: Work) -> dict[str, Any]:
    """Start the engine and time it."""
    began = time.perf_counter()
    engine = Engine(work)
    if work.options.get("load_format") == "dummy":
        engine.llm.collective_rpc(_draw_weights)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "ms_per_step": {}, "first_token_ms": {}}
    result["model_bytes"] = engine.llm.collective_rpc(_model_bytes)
    result["used_bytes"] = engine.llm.collective_rpc(_used_bytes)
    energy, used = Energy(), {}
    for batch in work.batches:
        engine.generate(batch, PROMPT, WARM_UP_TOKENS)
        before, all_tokens = energy.millijoules(), WARM_UP_TOKENS + work.steps
        more = engine.seconds(batch, PROMPT, all_tokens)
        after = energy.millijoules()
        # a short run may end between two updates of the counter: no figure then
        if before is not None and after is not None and after > before:
            used[str(batch)] = (after - before) / (work.repeats * batch * all_tokens)
        few = engine.seconds(batch, PROMPT, WARM_UP_TOKENS)
        result["ms_per_step"][str(batch)] = 1e3 * (more - few) / work.steps
    if used:
        result["millijoules_per_token"] = used
    for count, length in work.firsts:
        engine.generate(count, length, 1)
        result["first_token_ms"][f"{count}x{length}"] = 1e3 * engine.seconds(count, length, 1)
    if work.profile:
        result |= _profile(engine)
    (answer,) = engine.generate(1, PROMPT, CHECKED_TOKENS, logprobs=1)
    result["checked"] = [
        {str(token): entry.logprob for token, entry in row.items()} for row in answer.outputs[0].logprobs or ()
    ]
    return result


def _profile(engine: Engine) -> dict[str, Any]:
    """communication: by batch, its share in the time of all kernels, the largest of the GPUs. kernels: the longest of
    a step, and of the last of the first tokens, in microseconds."""
    work, shares, kernels = engine.work, {}, {}
    for batch in work.batches:
        found = engine.profiled(batch, PROMPT, PROFILED_TOKENS)
        shares[str(batch)] = max(_communication(times) for times in found)
        kernels[f"batch {batch}"] = _longest(found[0], PROFILED_TOKENS)
    for count, length in work.firsts:
        (first, *_) = engine.profiled(count, length, 1)
        kernels[f"first of {count}x{length}"] = _longest(first, 1)
    alone = work.options["tensor_parallel_size"] == 1
    return {"kernels": kernels, **({} if alone else {"communication": shares})}


def _communication(times: Mapping[str, float]) -> float:
    own = sum(us for name, us in times.items() if any(word in name.lower() for word in COMMUNICATION))
    return own / (sum(times.values()) or 1.0)


def _longest(times: Mapping[str, float], calls: int) -> dict[str, float]:
    every = sorted(times.items(), key=lambda item: -item[1])[:LONGEST_KERNELS]
    return {"all": sum(times.values()) / calls, **{name[:80]: us / calls for name, us in every}}


def _start_profile(worker: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    worker.quantkit_profile = profile(activities=[ProfilerActivity.CUDA])
    worker.quantkit_profile.start()


def _stop_profile(worker: Any) -> dict[str, float]:
    torch.cuda.synchronize()
    worker.quantkit_profile.stop()
    return {entry.key: float(entry.self_device_time_total) for entry in worker.quantkit_profile.key_averages()}


def _draw_weights(worker: Any) -> None:
    """Weights as a model has them, in the place of a dummy load's, which are tiny, all alike or zeros: a product of
    such draws less power, so that a prompt takes up to a tenth less time than on any model."""
    drawn = torch.Generator(next(worker.get_model().parameters()).device).manual_seed(0)
    for name, weight in worker.get_model().named_parameters():
        field = name.rpartition(".")[2]
        if weight.dtype in (torch.float16, torch.bfloat16):
            if weight.dim() == 1:
                weight.data.fill_(1.0 if "norm" in name else 0.0)
            elif field in SCALES:
                weight.data.uniform_(SCALE / 2, 3 * SCALE / 2, generator=drawn)
            elif weight.dim() == 2:
                weight.data.normal_(0.0, WEIGHT_DEVIATION, generator=drawn)
        elif field in PACKED and weight.dtype == torch.int32:
            weight.data.random_(-(2**31), 2**31 - 1, generator=drawn)


def _model_bytes(worker: Any) -> int:
    """Bytes that the weights of one worker take."""
    return sum(tensor.nbytes for tensor in worker.get_model().parameters())


def _used_bytes(worker: Any) -> int:
    """Bytes of the worker's GPU that are taken, the cache that vLLM reserves among them; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    run_script(main)
