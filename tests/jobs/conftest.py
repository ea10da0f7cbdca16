"""A calibration on little text, for tests that search and measure many times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.calibration.artifact import save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import Corpus
from quantkit.models.loading import open_stream
from tests.tiny import sample_text

SEQ_LEN = 32


@pytest.fixture(scope="session")
def short_calibration(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """family -> calibration artifact of its tiny model on four windows, made once a session."""
    folder = tmp_path_factory.mktemp("short-calibration")

    def artifact(family: str) -> Path:
        path = folder / f"{family}.safetensors"
        if not path.exists():
            stream, tokenizer = open_stream(str(tiny_model(family)))
            corpus = Corpus("sample", (sample_text(300),))
            save_calibration(
                calibrate(stream, tokenizer, corpus, name=family, windows=4, seq_len=SEQ_LEN, seed=0), path
            )
        return path

    return artifact
