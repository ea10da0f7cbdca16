"""The most probable token of every sequence, by one kernel that also keeps it."""

from __future__ import annotations

from torch import Tensor

from quantkit.cuda.launch import DTYPE_CODES, FixedLaunches, Launch
from quantkit.cuda.parameters import Pointer
from quantkit.ops.decode.instances import CHOOSE_THREADS, choose_unit
from quantkit.ops.decode.layout import DTYPES, VECTOR_VALUES

_VECTOR_BYTES = 16
_fixed = FixedLaunches()


def can_choose(logits: Tensor) -> bool:
    """Whether choose_most_probable takes logits [B, vocabulary]."""
    return logits.is_cuda and logits.dtype in DTYPES and logits.stride(1) == 1


def choose_most_probable(logits: Tensor, token: Tensor, tokens: Tensor, position: Tensor) -> None:
    """Write the place of the largest of logits [B, vocabulary] to token [B, 1], and to tokens [B, capacity].

    Of equal ones the first, and NaN before all numbers. position [1]: where in tokens. token, tokens and position are
    int64 and contiguous.
    """
    sequences, vocabulary = logits.shape
    even = sequences == 1 or logits.stride(0) % VECTOR_VALUES == 0
    vectors = vocabulary // VECTOR_VALUES if even and logits.data_ptr() % _VECTOR_BYTES == 0 else 0
    pointers: dict[str, Pointer | None] = {"logits": logits, "token": token, "tokens": tokens, "position": position}

    def launch() -> Launch:
        return Launch(
            choose_unit(DTYPE_CODES[logits.dtype]),
            logits.device,
            grid=(sequences,),
            block=CHOOSE_THREADS,
            args={
                **pointers,
                "vocabulary": vocabulary,
                "stride": logits.stride(0),
                "capacity": tokens.shape[1],
                "vectors": vectors,
            },
            overlap=True,
        )

    key = (logits.dtype, logits.shape, logits.stride(0), tokens.shape[1], vectors)
    _fixed.run(key, launch, logits.device, pointers)
