"""Seeded damage to files: bytes, JSON values, YAML lines, headers of safetensors files, and what files are."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 8, 16, 64, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e-300, 1e300),
    *("", "x", "4", "\u0000", "../../etc/passwd", "a" * 5000, [], {}, [[]], [1, 2], {"a": 1}, "bcq", "flatten", "F16"),
    *(float("nan"), float("inf")),
)
_SPREAD = 8


def flip_bit(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def set_bytes(content: bytes, chance: random.Random) -> bytes:
    place, count = chance.randrange(len(content)), chance.randrange(1, _SPREAD)
    return content[:place] + chance.randbytes(count) + content[place + count :]


def insert_bytes(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content) + 1)
    return content[:place] + chance.randbytes(chance.randrange(1, _SPREAD)) + content[place:]


def delete_bytes(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + content[place + chance.randrange(1, _SPREAD * 4) :]


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def append(content: bytes, chance: random.Random) -> bytes:
    return content + chance.choice((b"\0", b" ", b"\n", b"{}", chance.randbytes(64)))


def swap_ranges(content: bytes, chance: random.Random) -> bytes:
    size = min(chance.randrange(1, 64), len(content) // 2) or 1
    first, second = sorted((chance.randrange(len(content)), chance.randrange(len(content))))
    if second - first < size or second + size > len(content):
        return flip_bit(content, chance)
    middle = content[first + size : second]
    return (
        content[:first]
        + content[second : second + size]
        + middle
        + content[first : first + size]
        + content[second + size :]
    )


def zero_range(content: bytes, chance: random.Random) -> bytes:
    place, count = chance.randrange(len(content)), chance.randrange(1, 512)
    return content[:place] + bytes(len(content[place : place + count])) + content[place + count :]


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip_bit, set_bytes, insert_bytes, delete_bytes, truncate, append, swap_ranges, zero_range),
)


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """One random change of some bytes; an empty content grows."""
    return chance.choice(BYTES)(content, chance) if content else append(content, chance)


def mutate_json(content: bytes, chance: random.Random) -> bytes:
    """One random change of a JSON document that stays JSON: a value, a key, a level, a key twice."""
    document = json.loads(content)
    places = list(_places(document))
    if not places or chance.random() < 0.03:
        return json.dumps(chance.choice(_STRANGE)).encode()
    holder, key = chance.choice(places)
    kind = chance.choice(("value", "value", "value", "near", "near", "delete", "rename", "nest", "twice"))
    if kind == "value":
        holder[key] = chance.choice(_STRANGE)
    elif kind == "near":
        holder[key] = _near(holder[key], chance)
    elif kind == "delete":
        del holder[key]
    elif kind == "nest":
        holder[key] = _nested(holder[key], chance.choice((1, 40, 500)))
    elif isinstance(holder, dict):
        value = holder.pop(key)
        if kind == "twice":
            holder[f"\ue000{key}"] = value
            holder[key] = _near(value, chance)
            return json.dumps(document).replace("\\ue000", "").encode()
        holder[str(_near(key, chance))] = value
    return json.dumps(document).encode()


def mutate_header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with one random change of its header's JSON or length; the tensors stay as they are."""
    (length,) = struct.unpack("<Q", content[:8])
    header, tensors = content[8 : 8 + length], content[8 + length :]
    if chance.random() < 0.1:
        return struct.pack("<Q", chance.choice((0, 1, length - 8, length + 8, 2**40, 2**64 - 1))) + header + tensors
    changed = mutate_json(header, chance)
    changed += b" " * (-len(changed) % 8)
    return struct.pack("<Q", len(changed)) + changed + tensors


def mutate_payload(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file with some bytes of its tensors changed, as many as before."""
    (length,) = struct.unpack("<Q", content[:8])
    start = 8 + length
    change = chance.choice((flip_bit, zero_range, swap_ranges))
    return content[:start] + change(content[start:], chance)


def mutate_lines(content: bytes, chance: random.Random) -> bytes:
    """A text with a line dropped, doubled, exchanged, or a value of one replaced."""
    lines = content.decode().splitlines()
    place = chance.randrange(len(lines))
    kind = chance.choice(("drop", "double", "exchange", "value", "value", "value", "indent", "alias"))
    if kind == "drop":
        del lines[place]
    elif kind == "double":
        lines.insert(place, lines[place])
    elif kind == "exchange":
        other = chance.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == "indent":
        lines[place] = " " * chance.randrange(1, 5) + lines[place]
    elif kind == "alias":
        lines += ["x: &x [1, 1]", "y: [*x, *x]"]
    else:
        name, colon, _ = lines[place].partition(":")
        lines[place] = (
            f"{name}{colon} {chance.choice((*map(json.dumps, _STRANGE), '.nan', '[', '&a', '!!set {a}', '0x'))}"
        )
    return "\n".join(lines).encode()


def break_file(path: Path, chance: random.Random) -> None:
    """Put something else in the place of a file: nothing, a folder, a pipe, a link to nowhere or to itself."""
    path.unlink()
    kind = chance.choice(("missing", "empty", "folder", "pipe", "dangling", "loop", "null", "zero"))
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind in ("null", "zero"):
        path.symlink_to(f"/dev/{kind}")


def _places(value: Any) -> Any:
    """Every (mapping or list, key or index) of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _places(child)


def _near(value: Any, chance: random.Random) -> Any:
    """Another value that looks like this one."""
    if isinstance(value, bool):
        return chance.choice((not value, int(value), None))
    if isinstance(value, int):
        return chance.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, float(value), str(value), value == 1)
        )
    if isinstance(value, float):
        return chance.choice((value * 1.0001, -value, value * 1e6, 0.0, int(value)))
    if isinstance(value, str):
        place = chance.randrange(len(value) + 1)
        return chance.choice(
            (value[:place] + "x" + value[place + 1 :], value[:place], value + " ", value.upper(), [value])
        )
    if isinstance(value, list):
        return chance.choice(
            (value[:-1], value + value[-1:], value[::-1], [*value, None], dict.fromkeys(map(str, value)))
        )
    if isinstance(value, dict):
        names = list(value)
        return chance.choice(
            (names, {name: value[name] for name in names[:-1]}, {**value, "extra": 1}, list(value.values()))
        )
    return chance.choice(_STRANGE)


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value
