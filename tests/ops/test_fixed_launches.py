"""Launches that are kept: every address is given anew, and all else follows from the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.launch import FixedLaunches, Launch
from quantkit.cuda.parameters import Pointer, kernel_parameters
from quantkit.ops.registry import OPS
from tests.ops.launches import record
from tests.ops.table import is_asked_for

KEPT = (
    *("rms_norm", "add_rms_norm", "gated_halves", "rotate_heads", "bipolar_linear", "bipolar_prepared_linear"),
    *("flatten_quantize", "flatten_quantize_tiles", "int8_gemm_tiles", "int8_gemm_requantize"),
)


def _address(pointer: Pointer | None) -> int:
    return 0 if pointer is None else pointer.data_ptr()


class Keys:
    """What launches of a key have in common."""

    def __init__(self) -> None:
        self.known: dict[object, object] = {}
        self.count = 0

    def take(
        self,
        kept: FixedLaunches,
        key: tuple[object, ...],
        make: Callable[[], Launch],
        device: torch.device,
        pointers: Mapping[str, Pointer | None],
    ) -> None:
        launch, found, given = make(), {}, dict(pointers)
        launch.check()
        for parameter in kernel_parameters(launch.unit.source, launch.unit.function):
            value = launch.args[parameter.name]
            if parameter.pointer:
                assert _address(given.pop(parameter.name)) == _address(value), parameter.name  # type: ignore[arg-type]
            else:
                found[parameter.name] = value
        assert not given
        shape = launch.unit, launch.grid, launch.block, launch.shared_mem, launch.overlap, launch.cluster
        assert self.known.setdefault((id(kept), device, key), (found, shape)) == (found, shape)
        self.count += 1


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=[row.title for row in ARCHITECTURES.values()])
@pytest.mark.parametrize("name", KEPT)
def test_addresses_are_open_and_all_else_follows_from_the_key(
    name: str, row: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys()
    record(monkeypatch, row)
    monkeypatch.setattr(FixedLaunches, "run", lambda *given: keys.take(*given))
    for _ in range(2):
        for sample in OPS[name].samples():
            if is_asked_for(sample, row):
                OPS[name].cuda(sample)
    assert keys.count >= 2 * len(keys.known) > 0
