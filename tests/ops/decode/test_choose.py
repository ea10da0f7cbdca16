"""The kernel that chooses the most probable token, against torch."""

from __future__ import annotations

import pytest
import torch

from quantkit.ops.decode.choose import can_choose, choose_most_probable

CUDA = torch.device("cuda")
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]
LOGITS = [(1, 128256), (3, 50257), (2, 7), (70, 2049), (2, 1000)]  # sequences and vocabulary
POSITION, CAPACITY = 5, 9


def _chosen(logits: torch.Tensor) -> torch.Tensor:
    token, position = torch.full((len(logits), 1), -1, device=CUDA), torch.tensor([POSITION], device=CUDA)
    tokens = torch.full((len(logits), CAPACITY), -1, device=CUDA)
    choose_most_probable(logits, token, tokens, position)
    assert torch.equal(tokens[:, POSITION], token[:, 0])
    assert (tokens != -1).sum() == len(logits)
    return token[:, 0]


def _first_of_the_largest(logits: torch.Tensor) -> torch.Tensor:
    return (logits == logits.amax(-1, keepdim=True)).int().cpu().argmax(-1).to(CUDA)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize(("sequences", "vocabulary"), LOGITS)
def test_the_first_of_the_largest_logits_is_chosen(sequences: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(sequences, vocabulary, device=CUDA).to(dtype)  # large vocabularies have equal ones
    for part in (logits, logits[:, :-1], logits[:, 1:]):  # rows apart, and none aligned
        assert can_choose(part)
        assert torch.equal(_chosen(part), _first_of_the_largest(part))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_what_is_chosen_among_nan_infinity_and_equals(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    cases = [[-inf] * 4, [1, nan, 2, nan], [-0.0, 0.0, -1, 0], [inf, nan, 0, 0], [-2, -1, -1, -3], [nan] * 4]
    logits = torch.tensor(cases, device=CUDA).to(dtype)
    assert _chosen(logits).tolist() == logits.cpu().argmax(-1).tolist() == [0, 1, 0, 1, 1, 0]


def test_tensors_on_a_cpu_are_not_for_this_kernel() -> None:
    assert not can_choose(torch.zeros(1, 64, dtype=torch.float16))
