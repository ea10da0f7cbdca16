"""The torch.library namespace that every quantkit op is defined in."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("quantkit", "DEF")
