"""Errors a user can act on: each prints as one line on stderr and exits with code 2."""


class QuantkitError(Exception):
    """Base of every expected failure; the message says what, where and what to do."""


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


class KernelError(QuantkitError):
    """A kernel that cannot be built or run on this machine."""


class DeviceError(QuantkitError):
    """A device that is not there, or of a kind that nothing here runs on."""


class GenerationError(QuantkitError):
    """A prompt that a model cannot continue."""


class BenchError(QuantkitError):
    """A measurement that must not be reported (wrong result, above the hardware's peak)."""


class EvaluationError(QuantkitError):
    """A task, comparison or report that cannot be made from what was given or is installed."""
