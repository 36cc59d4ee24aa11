"""Tensors and a note as a safetensors file with digests, written and read without copies.

The format of safetensors: eight bytes with the size of the header, the header, and the payload, in
which each tensor has its place. The header is a JSON object; its `__metadata__` holds

    afterdrop   the note, as JSON
    payload     the digest of the payload
    digest      the digest of the header without this entry

so that a note is verified without reading the tensors.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from afterdrop.errors import DamagedError
from afterdrop.files import (
    DIGEST,
    as_json,
    check_seal,
    open_regular,
    parse_json,
    sealed,
    written_atomically,
)

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_METADATA, _NOTE, _PAYLOAD = "__metadata__", "afterdrop", "payload"
_CHUNK = 1 << 24  # bytes that are hashed and written at a time
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**48  # of a tensor
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor | list[Tensor]], note: dict[str, Any]
) -> None:
    """Writes tensors and a note, atomically; holds no second copy of CPU tensors.

    Args:
        path: The file.
        tensors: The tensors by name. Those of a list are written as one, joined along the last
            dimension.
        note: What can be stored as JSON.

    Raises:
        FileError: If the file cannot be written; an existing one is left as it is.
    """
    # Wide types first, so that every tensor is aligned to its type.
    pieces = {name: [t] if isinstance(t, Tensor) else t for name, t in tensors.items()}
    names = sorted(pieces, key=lambda name: (-pieces[name][0].element_size(), name))
    header, place = {}, 0
    for name in names:
        first, start = pieces[name][0], place
        place += sum(piece.numel() for piece in pieces[name]) * first.element_size()
        shape, kind = _shape_of(pieces[name]), _NAMES[first.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, place]}
    text = json.dumps(as_json(note))
    size = len(_header_bytes(header, text, "0" * 64))
    payload = hashlib.sha256()
    with written_atomically(path) as file:
        file.seek(size)
        for name in names:
            for content in _contents([piece.detach().cpu() for piece in pieces[name]]):
                payload.update(content)
                file.write(content)
        file.seek(0)
        file.write(_header_bytes(header, text, payload.hexdigest()))


def _shape_of(pieces: list[Tensor]) -> list[int]:
    first, *others = pieces
    if not others:
        return list(first.shape)
    return [*first.shape[:-1], sum(piece.shape[-1] for piece in pieces)]


def _contents(pieces: list[Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors on the CPU that are joined along the last dimension, part by part."""
    if len(pieces) == 1 and pieces[0].is_contiguous():
        whole = _bytes_of(pieces[0])
        yield from (whole[start : start + _CHUNK] for start in range(0, len(whole), _CHUNK))
        return
    rows = [piece.flatten(0, -2) if piece.dim() > 1 else piece[None] for piece in pieces]
    for pieces_of_row in zip(*rows):
        yield from (_bytes_of(piece.contiguous()) for piece in pieces_of_row)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads and verifies what `write_tensors` wrote, onto the CPU.

    Raises:
        FileError: If the file cannot be read.
        DamagedError: If it is truncated, foreign, or does not match its digests.
    """
    payload, found = hashlib.sha256(), {}
    with open_regular(path) as file:
        header, note, wanted = _read_header(file, path)
        left = _size_of(file) - file.tell()
        places = _places(header, left, path)
        for name, (shape, dtype) in places.items():
            found[name] = torch.empty(shape, dtype=dtype)
            _fill(file, _bytes_of(found[name]), payload)
    if payload.hexdigest() != wanted:
        raise _damaged(path, "its payload does not match its digest")
    return found, note


def read_note(path: str | Path) -> dict[str, Any]:
    """The verified note of a file, without reading its tensors.

    Raises:
        FileError: As `read_tensors`.
    """
    with open_regular(path) as file:
        return _read_header(file, path)[1]


def _places(
    header: dict[str, Any], size: int, path: str | Path
) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shape and type of each tensor in the order of the payload, which they must fill exactly."""
    found, place = {}, 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (start, stop), shape = entry["data_offsets"], entry["shape"]
            dtype = _TYPES[entry["dtype"]]
            _check_shape(shape)
            if start != place or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} is not where it belongs")
            found[name], place = (shape, dtype), stop
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"its header is wrong ({error})") from error
    if place != size:
        raise _damaged(path, f"it has {size:,} bytes of tensors where its header says {place:,}")
    return found


def _check_shape(shape: object) -> None:
    """Requires sizes that torch can make: with a right digest too, a header may say anything."""
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"shape {shape!r:.60}")
    if not all(type(size) is int and size >= 0 for size in shape):  # True is an int
        raise ValueError(f"shape {shape!r:.60}")
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:  # strides of empty ones too
        raise ValueError(f"shape {shape!r:.60}")


def _header_bytes(tensors: dict[str, Any], note: str, payload: str) -> bytes:
    """The beginning of a file, up to its payload; its size does not depend on the digests."""
    entries = {_METADATA: {_NOTE: note, _PAYLOAD: payload}, **tensors}
    entries[_METADATA][DIGEST] = sealed(entries)[DIGEST]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: FileIO, path: str | Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The entries of the tensors, the note, and the digest of the payload."""
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= min(_LONGEST_HEADER, _size_of(file)):
        raise _damaged(path, "it is truncated or not a safetensors file")
    header = parse_json(file.read(size), f"the header of {path}")
    metadata = header.pop(_METADATA, None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(
        isinstance(metadata.get(name), str) for name in (_NOTE, _PAYLOAD)
    ):
        raise _damaged(path, "it is not a file of afterdrop")
    without = {name: value for name, value in metadata.items() if name != DIGEST}
    check_seal(path, {_METADATA: without, **header, DIGEST: metadata.get(DIGEST)})
    note = parse_json(metadata[_NOTE].encode("utf-8", "surrogatepass"), f"the header of {path}")
    if not isinstance(note, dict):
        raise _damaged(path, "its note is not a JSON object")
    return header, note, metadata[_PAYLOAD]


def _size_of(file: FileIO) -> int:
    place = file.tell()
    size = file.seek(0, 2)
    file.seek(place)
    return size


def _fill(file: FileIO, content: memoryview, digest: Any) -> None:
    """Reads into a tensor's memory, as far as the file goes, and adds what was read to a digest."""
    place = 0
    while got := file.readinto(content[place : place + _CHUNK]):
        digest.update(content[place : place + got])
        place += got


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _damaged(path: str | Path, why: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged, or not a file of afterdrop: {why}; restore it from a copy, or create "
        "it again"
    )
