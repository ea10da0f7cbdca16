"""vLLM serves quantkit checkpoints: ``vllm serve FOLDER``, by the entry point ``vllm.general_plugins``.

``config`` tells vLLM which method each of its layers takes: ``linear`` is that of Linears and heads, ``experts``
that of a block's experts. ``between`` is what runs between the products: norms and gated activations. ``parts`` says
which rows and columns of each stored Linear a rank keeps, and alone imports no vllm.
"""

from __future__ import annotations

TESTED_VERSIONS = "0.24.0"
ENTRY_POINT_GROUP = "vllm.general_plugins"
DUMMY_WEIGHTS = "dummy"
"""vLLM's load format that reads no weights, for measuring."""


def register() -> None:
    """Make ``quantkit`` known to vLLM; it calls this in every process, and calling it again changes nothing."""
    import quantkit.integrations.vllm.config  # noqa: F401  # registers where it defines its class
