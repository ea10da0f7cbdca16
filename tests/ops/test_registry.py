"""Every op of the table: well defined for torch, and the same on every device for its samples."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.ops.registry import OPS, Op
from tests.ops.table import NAMES, is_asked_for, samples_on

CHECKED = 4  # samples that torch's own checks run on, which trace each op several times
# bcq: fp16 and bf16 results, and weights rounded to them, as in ops/bcq/test_op.py. Attention: a code of P that lies
# between two may go either way with the last bit of exp.
RTOL = {
    "bcq_linear": 1e-2,
    "bcq_linear_prepared": 1e-2,
    "bcq_gated": 1e-2,
    "bcq_experts": 1e-2,
    "trellis_linear": 1e-2,
    "trellis_linear_prepared": 1e-2,
    "bipolar_linear": 2e-2,
    "int8_attention": 2e-2,
    "rms_norm": 1e-6,  # less than one element of 4096 that rounds another way in 16 bits
    "add_rms_norm": 1e-6,
    "gated_halves": 1e-6,
}
NOT_EXACT_ON_A_GPU = {
    "bcq_linear": "sums in another order",
    "bcq_linear_prepared": "sums in another order",
    "bcq_gated": "sums in another order",
    "bcq_experts": "sums in another order",
    "trellis_linear": "sums in another order, of planes rounded to 16 bits",
    "trellis_linear_prepared": "sums in another order, of planes rounded to 16 bits",
    "bipolar_linear": "weights per group run on the bcq kernels",
    "int8_attention": "the last bit of exp",
    "rms_norm": "torch's own sums of fp32, in another order",
    "add_rms_norm": "torch's own sums of fp32, in another order",
    "gated_halves": "torch's own activation in fp32, the last bit of exp",
}


@pytest.mark.parametrize("name", NAMES)
def test_ops_are_well_defined_for_torch(name: str, device: torch.device) -> None:
    """Schema, fake against real results, tracing."""
    op = OPS[name]
    for sample in islice(samples_on(op, device), CHECKED):
        torch.library.opcheck(op.overload, tuple(sample))


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_is_that_of_the_arguments(name: str) -> None:
    op: Any = OPS[name]
    schema = op.overload._schema
    assert [argument.name for argument in schema.arguments] == list(op.arguments._fields)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert defaults == op.arguments._field_defaults
    assert len(schema.returns) == 1


@pytest.mark.parametrize("name", NAMES)
def test_references_define_the_op_on_the_cpu(name: str) -> None:
    op = OPS[name]
    for sample in islice(op.samples(), CHECKED):
        assert torch.equal(op.overload(*sample), op.reference(sample))


def _differ(op: Op, got: Tensor, expected: Tensor) -> bool:
    if op.name not in NOT_EXACT_ON_A_GPU:
        return not torch.equal(got, expected)
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    return not error < RTOL[op.name]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_the_reference_gives(name: str) -> None:
    op, row = OPS[name], gpu_of(torch.device("cuda", 0)).architecture
    for number, sample in enumerate(op.samples()):
        if not is_asked_for(sample, row):
            continue
        given = (value.cuda() if isinstance(value, Tensor) else value for value in sample)
        assert not _differ(op, op.overload(*given).cpu(), op.reference(sample)), f"{number=} {sample=}"
