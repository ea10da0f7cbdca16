"""Write a copy of a model whose norms put out a few outlier channels, with the same function.

python scripts/flattenquant/inject_outliers.py MODEL OUT --factor 50 --channels 4

The gain (and bias) of the chosen channels of every norm that feeds Linears is multiplied by the factor and the
columns of those Linears are divided by it: what large language models do by themselves (FlattenQuant section 3.1:
channels 20-100 times larger than most) on a model small enough to measure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from quantkit.models.families import decoder_blocks, feeds_of, linear_weight
from quantkit.models.loading import load_model
from quantkit.models.structure import LINEAR_TYPES
from scripts.common import run_script


@torch.no_grad()
def inject_outliers(model: torch.nn.Module, *, factor: float, channels: int, seed: int = 0) -> list[int]:
    """Enlarge the same channels of every norm that feeds Linears; returns their indices."""
    chosen: list[int] = []
    for prefix, _block in decoder_blocks(model):
        for feed in feeds_of(model):
            source = model.get_submodule(f"{prefix}.{feed.source}")
            if isinstance(source, LINEAR_TYPES):
                continue
            gain = source.weight
            assert isinstance(gain, torch.Tensor)
            if not chosen:
                generator = torch.Generator().manual_seed(seed)
                chosen = torch.randperm(gain.numel(), generator=generator)[:channels].tolist()
            gain[chosen] *= factor
            if isinstance(bias := getattr(source, "bias", None), torch.Tensor):
                bias[chosen] *= factor
            for target in feed.targets:
                linear_weight(model.get_submodule(f"{prefix}.{target}"))[:, chosen] /= factor
    return chosen


def save_with_outliers(model: str, out: Path, *, factor: float, channels: int) -> list[int]:
    """The copy as a folder that every quantkit command takes for MODEL, in fp32: fp16 would round the small columns."""
    loaded, tokenizer = load_model(model, dtype=torch.float32)
    chosen = inject_outliers(loaded, factor=factor, channels=channels)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=50.0)
    parser.add_argument("--channels", type=int, default=4)
    options = parser.parse_args()
    chosen = save_with_outliers(options.model, options.out, factor=options.factor, channels=options.channels)
    print(f"{options.out}: channels {chosen} of every norm x {options.factor:g}")


if __name__ == "__main__":
    run_script(main)
