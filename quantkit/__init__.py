"""quantkit: post-training quantization of large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from quantkit.integrations.import_hook import when_transformers_loads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(
    folder: str, *, device: str | None = None, dtype: Any = None, layout: Literal["latency", "few", "batch"] = "latency"
) -> PreTrainedModel:
    """The model of a quantkit checkpoint, ready to generate.

    device: by default the first GPU, else the CPU.
    dtype: of the activations and unquantized weights; the checkpoint's own by default.
    layout: the order of bcq weights on a GPU: for one token at a time ("latency"), two to four ("few"), more ("batch").
    Raises CheckpointError for a folder that is no quantkit checkpoint or is damaged.
    """
    from quantkit.integrations.transformers import load_checkpoint
    from quantkit.models.loading import first_device

    return load_checkpoint(folder, device=device or first_device(), dtype=dtype, layout=layout)


when_transformers_loads()
