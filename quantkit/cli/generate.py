"""``quantkit generate``: continue a prompt, greedily."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.common import DeviceOption, chosen_device


def generate(
    model: Annotated[str, typer.Argument(help="Folder (also a quantized one), hub id, or smollm2-135m.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    new: Annotated[int, typer.Option(help="At most so many new tokens.", min=1)] = 128,
    device: DeviceOption = None,
) -> None:
    """Continue a prompt with a static KV cache; on a GPU each token is one CUDA graph."""
    from quantkit.models.loading import load_model, resolve_model

    resolve_model(model)
    from quantkit.runtime.generation import generate as continue_ids

    loaded, tokenizer = load_model(model, device=chosen_device(device))
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(loaded.device)
    tokens = continue_ids(loaded, ids, new, stop=tokenizer.eos_token_id)
    typer.echo(tokenizer.decode(tokens, skip_special_tokens=True))
