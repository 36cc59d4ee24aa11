"""Scores as files: tensors with the protocol in the header."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from torch import Tensor

from afterdrop.errors import AfterdropError, FileError
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores import schema
from afterdrop.files import check_header
from afterdrop.tensor_files import read_tensors, write_tensors
from afterdrop.typed_records import read_record

_KIND, _VERSION = "afterdrop-scores", 3
_PILOT = "pilot/"

Tensors = dict[str, Tensor]
Contents = tuple[Protocol, Tensors]


class _ResultsNote(TypedDict):
    """What a file of results has in its note, among other things."""

    protocol: str


def write_scores(
    path: str | Path,
    protocol: Protocol,
    tensors: Mapping[str, Tensor],
    pilot: Contents | None = None,
) -> None:
    """Writes scores, and those of a pilot if there was one."""
    note = {"kind": _KIND, "version": _VERSION, "protocol": protocol.to_json()}
    if pilot is not None:
        note["pilot"] = pilot[0].to_json()
        tensors = {**tensors, **{_PILOT + name: tensor for name, tensor in pilot[1].items()}}
    write_tensors(path, tensors, note)


def read_scores(path: str | Path) -> tuple[Contents, Contents | None]:
    """Reads scores, and those of a pilot if there was one.

    Raises:
        FileError: If the file is missing, damaged, foreign or of another version.
    """
    tensors, note = read_tensors(path)
    check_header(path, note, _KIND, _VERSION)
    of_pilot = {n.removeprefix(_PILOT): t for n, t in tensors.items() if n.startswith(_PILOT)}
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PILOT)}
    scores = check_results(path, own, note), own
    if "pilot" not in note:
        return scores, None
    return scores, (check_results(path, of_pilot, {"protocol": note["pilot"]}), of_pilot)


def check_results(path: str | Path, tensors: Mapping[str, Tensor], note: object) -> Protocol:
    """The protocol in a note, once the tensors beside it are those that it declares.

    Raises:
        FileError: If the protocol is damaged, or a tensor is missing, unknown, of another shape or
            type, or has targets, classes or examples that the protocol rules out.
    """
    try:
        protocol = Protocol.from_json(read_record(_ResultsNote, note)["protocol"])
        schema.check(tensors, protocol)
        schema.check_ranges(tensors, protocol)
    except (AfterdropError, ValueError) as error:
        raise FileError(f"{path} is damaged ({error}); remove it and evaluate again") from error
    return protocol
