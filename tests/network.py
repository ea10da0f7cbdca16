"""A network that never answers."""

from __future__ import annotations

import time
from typing import Any

import pytest

HUB_ANSWER_SECONDS = 2.0  # within which the program promises to say that the hub is unreachable
_HANG_SECONDS = 3.0


def _hang(*_arguments: Any, **_options: Any) -> list[Any]:
    time.sleep(_HANG_SECONDS)
    return []


def cut_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name resolution hangs, as behind a firewall that drops packets: socket time-outs do not cover it."""
    monkeypatch.setattr("socket.getaddrinfo", _hang)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
