"""Writing the weights of a checkpoint as they come, no more than one shard of them in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from quantkit.storage.tensors import write_tensors

SHARD_BYTES = 10**9
INDEX = "model.safetensors.index.json"
Write = Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], None]


class ShardWriter:
    """Takes tensors one by one and writes them in files of at most ``shard_bytes``, a larger tensor by itself."""

    def __init__(
        self, folder: Path, metadata: Mapping[str, str], shard_bytes: int = SHARD_BYTES, write: Write = write_tensors
    ):
        """metadata: of every file. write: (path, tensors, metadata), which makes one."""
        self._folder, self._metadata, self._limit, self._write = folder, dict(metadata), shard_bytes, write
        self._held: dict[str, Tensor] = {}
        self._held_bytes = self._total = 0
        self._shards: list[tuple[str, ...]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; raises OSError where a full shard cannot be written."""
        size = tensor.numel() * tensor.itemsize
        if self._held and self._held_bytes + size > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += size
        self._total += size

    def finish(self) -> None:
        """Write the rest, name the files by their number, and the index where there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._path(index).rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        document = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        self._write(self._path(len(self._shards)), self._held, self._metadata)
        self._shards.append(tuple(self._held))
        self._held, self._held_bytes = {}, 0

    def _path(self, index: int) -> Path:
        return self._folder / f"model-{index + 1:05}.safetensors"
