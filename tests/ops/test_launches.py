"""Every launch of every op on every GPU generation: arguments, sizes and instances, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.device import gpu_of
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq import autotune
from quantkit.ops.bcq.arranged import InputOrder, arranged_gated, arranged_norm
from quantkit.ops.bcq.op import BcqLinearPrepared, bcq_linear_with_epilogue
from quantkit.ops.decode.choose import choose_most_probable
from quantkit.ops.decode.op import add_norm, attention, gated, norm, place_prompt
from quantkit.ops.epilogue import Epilogue
from quantkit.ops.instances import INSTANCES, all_units
from quantkit.ops.registry import OPS
from quantkit.ops.solve import codes, trellis
from quantkit.ops.solve.instances import CODED_COLUMNS, MOST_COLUMNS, TRELLIS_FILTERS
from quantkit.ops.solve.trellis import RowCode
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq.quantizer import BcqSettings, quantize
from quantkit.quantizers.trellis.filters import filter_for
from tests.ops.bcq.cases import random_weight
from tests.ops.decode.cases import prompt_heads, token_behind_others
from tests.ops.launches import Recorder, record
from tests.ops.table import NAMES, is_asked_for

ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
CPU = torch.device("cpu")


@pytest.fixture(params=ROWS)
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorder]:
    row: Architecture = request.param
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    autotune._gpu_name.cache_clear()
    autotune.gpu_key.cache_clear()
    autotune.read_table_again()
    yield record(monkeypatch, row)
    gpu_of.cache_clear()
    autotune._gpu_name.cache_clear()
    autotune.gpu_key.cache_clear()
    autotune.read_table_again()


def _run_op(name: str, recorder: Recorder) -> None:
    """Run an op's samples; they launch kernels of its family only."""
    before, family = len(recorder.launches), OPS[name].arguments.__module__.split(".")[2]
    samples = [sample for sample in OPS[name].samples() if is_asked_for(sample, recorder.row)]
    for sample in samples:
        OPS[name].cuda(sample)
    own = recorder.launches[before:]
    assert family in INSTANCES
    assert {launch.unit.source.file.split("/")[0] for launch in own} <= {family}, name
    assert own or name == "int8_gemm" or not samples, name  # int8_gemm: cuBLAS multiplies rows


def _run_decode() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for width in (64, 4104, 16384):
            x, weight = torch.randn(3, 1, width).to(dtype), torch.ones(width, dtype=dtype)
            norm(x, weight, weight, 1e-5, centered=True)
            add_norm(x, x, (weight, None), 1e-6, centered=False)
        for head_dim in (64, 128, 256):
            q, token, cache, mask = token_behind_others(head_dim, dtype, CPU)
            attention(q, token, cache, mask, 0.7, 0.5)
            q, token, cache, mask = token_behind_others(head_dim, dtype, CPU, sequences=3)
            attention(q, token, cache, mask.expand(3, -1, -1, -1), 0.7)
            q, token, cache, mask = token_behind_others(head_dim, dtype, CPU, sequences=40)
            attention(q, token, cache, mask, 0.7)
            long = tuple(torch.zeros(1, 2, 9000, head_dim, dtype=dtype) for _ in range(2))
            attention(q, token, (long[0], long[1]), torch.ones(1, 1, 1, 9000).bool(), 0.7)
        for rotary, scale in ((True, None), (False, 0.5), (False, None)):
            heads, angles, cache = prompt_heads(2, 9, dtype, CPU)
            place_prompt(heads, angles if rotary else None, cache, scale)
        token, tokens = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
        choose_most_probable(torch.zeros(2, 100, dtype=dtype), token, tokens, torch.tensor([3]))
        for activation in ACTIVATIONS:
            gated(torch.zeros(2, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype), activation)


def _run_arranged() -> None:
    order = InputOrder(weight_bits=3, tile_tokens=64, work_bytes=1 << 22)
    for dtype in (torch.float16, torch.bfloat16):
        for width in (64, 4104, 16384):
            x, weight = torch.randn(3, 1, width).to(dtype), torch.ones(width, dtype=dtype)
            for bias, centered in ((weight, True), (None, False)):
                arranged_norm(x, (weight, bias), 1e-5, order, centered=centered)
        arranged_gated(torch.zeros(2, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype), "silu", order)


def _run_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(40, 136), torch.randn(300, 136)
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "is_cuda", True)
        for bits in (1, 8):
            for group_size, offset in ((64, True), (88, False)):
                settings = BcqSettings(bits, group_size, offset, compensate=True, sweeps=1)
                quantize(LayerInput("layer", weight, hessian=x.t() @ x), settings)
        for width, groups in ((32, 3), (CODED_COLUMNS + 8, 2)):
            latent, scales = torch.randn(5, groups * width - 8), torch.ones(3, 5, groups)
            chosen, _ = codes.nearest_codes(latent, scales, scales[0], width)
            codes.weight_of(chosen, scales, scales[0], width)
            codes.gradients_of_groups(latent, chosen, 3, width)
        scales = torch.full((144,), 0.02)
        for bits, taps in TRELLIS_FILTERS:
            rows, values = RowCode.of(scales, filter_for(bits, taps)), torch.randn(MOST_COLUMNS, len(scales))
            trellis.code_columns(values, rows)
            trellis.round_columns(values, torch.eye(len(values)), rows)
            trellis.descend_columns(values, values, torch.eye(len(values)), rows)


def _run_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    weight, x = random_weight(2, 40, 512, 64, offset=True).tiled(), torch.randn(1, 1, 512).half()
    for epilogue in (Epilogue("silu"), Epilogue(residual=torch.randn(1, 1, 40).half())):
        op = BcqLinearPrepared(x, weight.tiles, weight.scale_tiles, None, 40, 64)
        bcq_linear_with_epilogue(op, epilogue)


def test_every_kernel_is_launched_by_its_family_with_its_parameters_and_as_a_compiled_instance(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        _run_op(name, recorder)
    _run_decode()
    _run_arranged()
    _run_solvers(monkeypatch)
    _run_epilogues(monkeypatch)
    compiled = set(all_units(recorder.row))
    assert {launch.unit for launch in recorder.launches} <= compiled
    assert set(recorder.functions) == {unit.function for unit in compiled}
