import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantkit.cuda.architectures import architecture
from quantkit.cuda.device import Gpu
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError
from quantkit.ops.bcq import autotune
from quantkit.ops.bcq.autotune import choose, gpu_key, shape_class
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.order import Order
from tests.ops.bcq.cases import BINARY, DEQUANTIZE, GEMM, GEMM_MMA, INT8, KERNELS, LEVEL, LUT, random_weight

GPU = "Some GPU"
CPU = torch.device("cpu")
PROMPTS_MEASURED = 256  # tokens, at least, in the order for batches
MANY = ("32", "64", "128", "256", "512", "1024", "2048", "4096")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the table is; pretends that CPU tensors are on a GPU of compute capability 9.0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(autotune, "gpu_of", lambda device: Gpu(architecture(9, 0), 132))
    autotune._gpu_name.cache_clear()
    autotune.gpu_key.cache_clear()
    autotune.read_table_again()
    path = tmp_path / "quantkit" / "kernels" / "bcq_autotune.json"
    path.parent.mkdir(parents=True)
    yield path
    autotune._gpu_name.cache_clear()
    autotune.gpu_key.cache_clear()
    autotune.read_table_again()


def x(tokens: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(tokens, 4096, dtype=dtype)


def test_near_shapes_share_a_class() -> None:
    assert shape_class(4, 4096, 11008, 128) == shape_class(4, 5120, 10240, 128) == "q4-s128-n12-k13"
    assert shape_class(4, 4096, 4096, 40) == "q4-sbytes-n12-k12"
    assert shape_class(4, 4096, 4096, 64, 8) == "q4-s64-n12-k12-scales8"
    assert shape_class(4, 4096, 4096, 64, order=Order.CODES) == "q4-s64-n12-k12-batch"
    assert shape_class(4, 4096, 4096, 64, order=Order.GRID) == "q4-s64-n12-k12-grid"


def test_unmeasured_shapes_follow_the_gpu_generation(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(x(1), 4, 4096, 128) == BINARY
    assert choose(x(1), 4, 4096, 40) == LUT
    assert choose(x(2), 4, 4096, 128) == choose(x(2), 4, 4096, -1) == BINARY
    assert choose(x(2), 4, 4096, 64) == choose(x(3), 4, 4096, 128) == choose(x(8), 4, 4096, -1) == INT8
    assert choose(x(2), 4, 4096, 40) == LUT
    assert choose(x(1), 4, 4096, 32) == INT8
    assert choose(x(1), 4, 4096, 64) == BINARY
    assert choose(x(9), 4, 4096, 128) == choose(x(256), 4, 4096, 128) == GEMM
    assert choose(x(4096), 4, 4096, 128) == GEMM
    assert choose(x(257), 5, 4096, 128) == choose(x(4097), 4, 4096, 128) == choose(x(9), 4, 4096, 40) == DEQUANTIZE
    assert choose(x(1, dtype=torch.float32), 4, 4096, 128) == DEQUANTIZE
    assert choose(x(8), 4, 4096, 128, order=Order.CODES) == LEVEL
    assert choose(x(9), 4, 4096, 128, order=Order.CODES) == choose(x(256), 4, 4096, 32, order=Order.CODES) == GEMM
    assert choose(x(4096), 4, 4096, 128, order=Order.CODES) == GEMM
    assert choose(x(257), 5, 4096, 128, order=Order.CODES) == DEQUANTIZE
    assert choose(x(4096), 8, 4096, 128, order=Order.GRID) == GEMM
    assert (
        choose(x(257), 4, 4096, 64, order=Order.CODES) == choose(x(4097), 4, 4096, 128, order=Order.CODES) == DEQUANTIZE
    )
    monkeypatch.setattr(autotune, "gpu_of", lambda device: Gpu(architecture(12, 0), 132))  # binary products emulated
    autotune.read_table_again()
    assert choose(x(1), 4, 4096, 128) == LUT
    assert choose(x(2), 4, 4096, 128) == INT8
    assert choose(x(9), 4, 4096, 128) == GEMM_MMA


def test_the_table_decides_and_an_edit_overrides(table: Path) -> None:
    rows = {str(count): BINARY if count <= 16 else GEMM for count in autotune.TOKEN_CLASSES}
    table.write_text(json.dumps({gpu_key(CPU): {"q4-s128-n12-k12": rows}}))
    assert [choose(x(count), 4, 4096, 128) for count in (3, 9, 17, 4097)] == [BINARY, BINARY, GEMM, DEQUANTIZE]
    table.write_text(table.read_text().replace('"1": "bcq_binary_gemv"', '"1": "bcq_lut_gemv"'))
    autotune.read_table_again()
    assert choose(x(1), 4, 4096, 128) == LUT


def test_a_class_that_came_measured_is_not_measured_again_and_the_users_table_goes_before_it(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict.fromkeys(map(str, autotune.TOKEN_CLASSES), LUT)
    monkeypatch.setattr(autotune, "_shipped", lambda: {GPU: {"q4-s128-n12-k12": rows, "q2-s128-n5-k8": rows}})
    monkeypatch.setattr(autotune, "cold_seconds", None)
    assert choose(x(3), 4, 4096, 128) == LUT
    autotune.ensure_measured(random_weight(2, 32, 256, 128, offset=True).tiled())
    assert not table.exists()
    table.write_text(json.dumps({gpu_key(CPU): {"q4-s128-n12-k12": dict.fromkeys(rows, INT8)}}))
    autotune.read_table_again()
    assert choose(x(3), 4, 4096, 128) == INT8


def test_the_measurements_that_come_with_quantkit_name_its_kernels() -> None:
    for classes in autotune._shipped().values():
        for name, kernels in classes.items():
            for_batches = name.endswith(("-batch", "-grid"))
            # What is missing of many tokens was measured when another kernel was the usual one there.
            measured = autotune.TOKEN_CLASSES[: len(kernels)] if for_batches else autotune.TOKEN_CLASSES
            assert tuple(map(int, kernels)) == measured
            assert measured[-1] >= PROMPTS_MEASURED
            assert set(kernels.values()) <= ({LEVEL, GEMM, DEQUANTIZE} if for_batches else set(KERNELS))


@pytest.mark.parametrize(("group_size", "least"), [(64, 1), (128, 2)])
@pytest.mark.parametrize("scale_bits", [16, 8])
def test_a_new_class_is_measured_on_two_copies_of_the_weight(
    table: Path, monkeypatch: pytest.MonkeyPatch, scale_bits: int, group_size: int, least: int
) -> None:
    """Every kernel that can run a row class is timed behind itself; the fastest of each is written down."""
    weight = random_weight(2, 32, 256, group_size, offset=True, scale_bits=scale_bits).tiled()
    seconds = {BINARY: 2.0, INT8: 1.2, LUT: 1.0, GEMM: 1.4, DEQUANTIZE: 1.5}
    timed: list[tuple[str, BcqTiles]] = []
    tokens: dict[str, set[int]] = defaultdict(set)

    def product(kernel: str, given: torch.Tensor, multiplied: BcqTiles, *_: object, weights_ready: bool) -> None:
        assert weights_ready
        timed.append((kernel, multiplied))
        tokens[kernel].add(len(given))

    def cold_seconds(before: Callable[[], None], call: Callable[[], None], _: torch.device) -> float:
        before()
        call()
        (first, other), (kernel, own) = timed[-2:]
        assert first == kernel
        assert own is weight
        assert other.tiles.data_ptr() != own.tiles.data_ptr()
        assert torch.equal(other.tiles, own.tiles)
        return seconds[kernel]

    monkeypatch.setattr(autotune, "product", product)
    monkeypatch.setattr(autotune, "cold_seconds", cold_seconds)
    autotune.ensure_measured(weight)
    (rows,) = json.loads(table.read_text())[gpu_key(CPU)].values()
    assert rows == dict.fromkeys(("1", "2", "4", "8"), LUT) | {"16": INT8} | dict.fromkeys(MANY, GEMM)
    assert (min(tokens[INT8]), max(tokens[INT8])) == (least, 16)  # one row is never faster on it with wide groups
    assert (min(tokens[GEMM]), max(tokens[GEMM])) == (4, 4096)
    assert max(tokens[LUT]) == 8
    count = len(timed)
    autotune.ensure_measured(weight)
    assert len(timed) == count


def test_what_another_process_measured_meanwhile_is_kept(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a served model measure at one time: none loses what another wrote, and all take the same kernels."""
    weight = random_weight(2, 32, 256, 128, offset=True).tiled()
    name = shape_class(2, 32, 256, 128)
    theirs = {gpu_key(CPU): {name: {"1": BINARY}, "q3-s128-n12-k12": {"1": LUT}}, "Another GPU": {name: {"1": INT8}}}

    def measured(_: BcqTiles) -> dict[str, str]:
        table.write_text(json.dumps(theirs))
        return {"1": LUT}

    monkeypatch.setattr(autotune, "measured_kernels", measured)
    autotune.ensure_measured(weight)
    assert json.loads(table.read_text()) == theirs
    monkeypatch.setattr(autotune, "measured_kernels", lambda _: {"1": LUT})
    autotune.ensure_measured(random_weight(2, 32, 512, 128, offset=True).tiled())
    new = {shape_class(2, 32, 512, 128): {"1": LUT}}
    assert json.loads(table.read_text()) == {**theirs, gpu_key(CPU): {**theirs[gpu_key(CPU)], **new}}


def test_the_usual_kernel_stays_where_another_is_hardly_faster(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(2, 32, 256, 128, offset=True).tiled()
    seconds = {BINARY: 1.0, INT8: 1.0, LUT: 0.96, GEMM: 1.02, DEQUANTIZE: 1.04}
    monkeypatch.setattr(autotune, "product", lambda kernel, *_, weights_ready: seconds[kernel])
    monkeypatch.setattr(autotune, "cold_seconds", lambda before, call, _: call())
    autotune.ensure_measured(weight)
    (rows,) = json.loads(table.read_text())[gpu_key(CPU)].values()
    usual = {"1": BINARY, "2": BINARY, "4": INT8, "8": INT8}
    assert rows == usual | dict.fromkeys(("16", *MANY), GEMM)


def test_what_other_kernels_took_does_not_count(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gpu_key(CPU)
    assert first.startswith(GPU)
    table.write_text(json.dumps({first: {"q4-s128-n12-k12": dict.fromkeys(map(str, autotune.TOKEN_CLASSES), LUT)}}))
    assert choose(x(1), 4, 4096, 128) == LUT
    monkeypatch.setattr(KernelSource, "text", "another kernel")
    autotune._gpu_name.cache_clear()
    autotune.gpu_key.cache_clear()
    autotune.read_table_again()
    assert choose(x(1), 4, 4096, 128) == BINARY


def test_a_number_of_tokens_that_the_table_lacks_follows_the_gpu_generation(table: Path) -> None:
    table.write_text(json.dumps({gpu_key(CPU): {"q4-s128-n12-k12": {"1": LUT}}}))
    assert [choose(x(count), 4, 4096, 128) for count in (1, 9)] == [LUT, GEMM]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "[" * 5000, '{"Some GPU": {"q": []}}', '{"Some GPU": {"q": {"1": "nonsense"}}}'],
    ids=["json", "list", "deep", "classes", "kernel"],
)
def test_damaged_tables_are_one_line(table: Path, content: str) -> None:
    table.write_text(content)
    with pytest.raises(KernelError, match=r"bcq_autotune\.json"):
        choose(x(1), 4, 4096, 128)
