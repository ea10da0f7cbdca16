"""Numbers that every kernel shares with Python; each family adds its own where its instances are listed."""

from __future__ import annotations

from quantkit.cuda.launch import DTYPE_CODES
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.epilogue import GATED, GATED_ROWS, NO_ACTIVATION
from quantkit.ops.items import SHARED_ITEMS

SHARED_CONSTANTS: dict[str, int] = {
    **{str(dtype).removeprefix("torch.").upper(): code for dtype, code in DTYPE_CODES.items()},
    **{name.upper(): activation.number for name, activation in ACTIVATIONS.items()},
    "NO_ACTIVATION": NO_ACTIVATION,
    "GATED": GATED,
    "GATED_ROWS": GATED_ROWS,
    "SHARED_ITEMS": SHARED_ITEMS,
}
"""FLOAT16, BFLOAT16, FLOAT32; RELU, GELU, ... and NO_ACTIVATION; GATED, GATED_ROWS; SHARED_ITEMS."""
