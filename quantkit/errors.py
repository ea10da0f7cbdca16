"""Errors a user can act on: each prints as one line on stderr and exits with code 2."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType


class QuantkitError(Exception):
    """Base of every expected failure; the message says what, where and what to do.

    told: whether another process, of which this one is a helper, tells the user; this one leaves it the time to.
    """

    told = False


class ModelError(QuantkitError):
    """A model that cannot be found, read or quantized."""


class DataError(QuantkitError):
    """Text that cannot be found, fetched or cut into windows."""


class RecipeError(QuantkitError):
    """A recipe, or a setting that overrides one, that asks for something impossible or unknown."""


class CalibrationError(QuantkitError):
    """A calibration artifact that is unreadable or belongs to another model."""


class StatsError(QuantkitError):
    """Weights or activations on which a method is undefined (NaN, Inf, empty)."""


class CheckpointError(QuantkitError):
    """A quantized checkpoint that is damaged, incomplete or of an unknown version."""


class OutputError(QuantkitError):
    """A result that cannot be written where it was asked for."""


class KernelError(QuantkitError):
    """A kernel that cannot be built or run on this machine."""


class DeviceError(QuantkitError):
    """A device that is not there, or of a kind that nothing here runs on."""


class GenerationError(QuantkitError):
    """A prompt that a model cannot continue."""


class ServingError(QuantkitError):
    """A checkpoint that cannot be served with what is installed."""


class BenchError(QuantkitError):
    """A measurement that must not be reported (wrong result, above the hardware's peak)."""


class EvaluationError(QuantkitError):
    """A task, comparison or report that cannot be made from what was given or is installed."""


@dataclass(frozen=True)
class refusing:
    """While entered, whatever goes wrong leaves as one ``kind`` of error, in one line: ``failure (reason); hint``.

    The one place where errors of libraries that read or write files become errors of ours. It takes every class of
    error: what is read was written by others, and libraries answer a bad file with whatever its content breaks
    (TypeError, RecursionError, huggingface_hub's StrictDataclassError, in tokenizers a plain Exception).
    QuantkitErrors pass as they are.
    """

    failure: str
    kind: type[QuantkitError]
    hint: str = ""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, QuantkitError):
            hint = f"; {self.hint}" if self.hint else ""
            raise self.kind(f"{self.failure} ({reason(error)}){hint}") from error


def reason(error: BaseException) -> str:
    """The first line of what an error says; the name of its class where that alone would not be understood."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, OSError | ValueError | RuntimeError) and text and not isinstance(error, RecursionError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
