"""Damage of bytes, JSON values and tensors, drawn from a seeded generator.

Damaged bytes stand for disks and transfers. Damaged values and tensors are written again by
afterdrop's own writers, as a hostile or older program would: whatever checksum a file carries is
then right, and the reader has nothing but the content to go by.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.5, -0.5, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "word", "none", "../x", "\ud800", "\x1b[31m", "a\nb", "\0", "é" * 300, "1e9"),
    *([], {}, [[]], [None], [1, 2, 3], ["a"], {"a": 1}, {"": None}, [0.5] * 50),
)
DEEP = 100_000
TOML = (
    *(b"-1", b"0", b"1", b"3", b"0.5", b"1e400", b"nan", b"inf", b"true", b"9" * 5000, b"9" * 30),
    *(b"''", b"'word'", b"'../x'", b'"\\u001b[31m"', b"'none'", b"[]", b"{}", b"[[]]", b"[1, 2]"),
    *(b"[0.5]", b"{a = 1}", b"2026-11-16", b"[" * 5000, b"9223372036854775807", b"['a']"),
)
RAW = (
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b"1" * 5000,
    b"\xff\xfe",
    b"\0" * 64,
    b'"\\ud800"',
    b"NaN",
    b"1e999",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"= ]",
)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to three edits: flipped bits, cuts, gaps, repetitions and foreign bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 4, 16, 200))
        edit = rng.randrange(7)
        if edit == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif edit == 1:
            del data[at:]
        elif edit == 2:
            del data[at : at + size]
        elif edit == 3:
            data[at:at] = data[at : at + size]
        elif edit == 4:
            data[at : at + size] = bytes(rng.randrange(256) for _ in range(size))
        elif edit == 5:
            data[at:at] = rng.choice(RAW)
        else:
            data[at : at + 8] = rng.choice((b"\xff", b"\0", b"\x7f")) * 8
    return bytes(data)


def damage_value(value: Any, rng: random.Random) -> Any:
    """A copy in which one or two values or keys, at any depth, are replaced, lost or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2))):
        place = _container(value, rng)
        if place is None:
            return rng.choice(VALUES)
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        edit = rng.randrange(4)
        if edit == 0:
            del place[key]
        elif edit == 1 and isinstance(place, dict):
            place[rng.choice(("", "more", "\ud800", str(key) + "x"))] = place.pop(key)
        elif edit == 1:
            place.insert(key, place[key])
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def _container(value: Any, rng: random.Random) -> Any:
    """A non-empty list or dictionary inside a value; None if there is none."""
    found = []

    def visit(node: Any) -> None:
        if isinstance(node, dict | list) and node:
            found.append(node)
            for child in node.values() if isinstance(node, dict) else node:
                visit(child)

    visit(value)
    return rng.choice(found) if found else None


def damage_json_text(content: bytes, rng: random.Random) -> bytes:
    """A JSON text with damaged values."""
    return json.dumps(damage_value(json.loads(content), rng)).encode()


def damage_toml(content: bytes, rng: random.Random) -> bytes:
    """TOML in which the value of one setting is replaced."""
    lines = content.splitlines()
    at = rng.choice([at for at, line in enumerate(lines) if b"=" in line])
    lines[at] = lines[at].partition(b"=")[0] + b"= " + rng.choice(TOML)
    return b"\n".join(lines)


def damage_lines(content: bytes, rng: random.Random) -> bytes:
    """JSON lines of which one is damaged, repeated, lost or moved."""
    lines = content.splitlines()
    at, edit = rng.randrange(len(lines)), rng.randrange(5)
    if edit == 0:
        del lines[at]
    elif edit == 1:
        lines.insert(at, rng.choice(lines))
    elif edit == 2:
        rng.shuffle(lines)
    else:
        lines[at] = damage_json_text(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def damage_header(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A header of safetensors with damaged entries or with a shape that no tensor has."""
    entries = sorted(name for name in header if name != "__metadata__")
    if rng.random() < 0.5 or not entries:
        changed = damage_value(header, rng)
        return changed if isinstance(changed, dict) else {"all": changed}
    header = copy.deepcopy(header)
    entry = header[rng.choice(entries)]
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    entry["shape"] = rng.choice(
        (
            [float(size) for size in shape],
            [True, *shape],
            [-1, -1, *shape],
            [1] * 100 + shape,
            [0, 2**62, 2**62],
            {str(size): size for size in shape},
        )
    )
    if 0 in entry["shape"]:  # an empty tensor, so that its size is right
        entry["data_offsets"] = [start, start]
        header["rest"] = {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
    return header


def damage_tensors(tensors: dict[str, Tensor], rng: random.Random) -> dict[str, Tensor]:
    """Tensors of which one is lost, renamed, of another type, shape or length, or other values."""
    made = dict(tensors)
    name = rng.choice(sorted(made))
    tensor = made[name]
    edits: tuple[Callable[[], Tensor | None], ...] = (
        lambda: None,
        lambda: made.setdefault(rng.choice(("x", name + "x", "a.b.c", "\x1b")), tensor) * 0 + 1,
        lambda: tensor.to(rng.choice((torch.float16, torch.int8, torch.bool, torch.float64))),
        lambda: tensor.flatten()[: rng.randrange(tensor.numel() + 1)],
        lambda: tensor.unsqueeze(0),
        lambda: torch.cat([tensor.reshape(-1), tensor.reshape(-1)]),
        lambda: torch.full_like(tensor, rng.choice((0, 1, 100))),
        lambda: -tensor if tensor.dtype != torch.bool else tensor,
        lambda: tensor / 0 if tensor.is_floating_point() else tensor + 2**30,
        lambda: torch.empty(0),
    )
    result = edits[rng.randrange(len(edits))]()
    if result is None:
        del made[name]
    else:
        made[name] = result.contiguous()
    return made
