"""afterdrop data: which data sets there are, and downloading them on request."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.data import fetch, names
from afterdrop.errors import DataError


def data(
    action: Annotated[Positional[Literal["list", "fetch"]], tyro.conf.arg(metavar="list|fetch")],
    name: Annotated[Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None,
    /,
    folder: Path | None = None,
    mirror: str | None = None,
    quiet: bool = False,
) -> None:
    """List the data sets by name, or download one. Nothing is fetched unless you ask here.

    Downloads resume, are verified by SHA-256 and written atomically. PTB is licensed by the LDC
    and cannot be fetched; put its files into the folder yourself.

    Args:
        action: list, or fetch NAME.
        name: mnist, wikitext-2 or enwik8.
        folder: The data folder; by default the environment variable AFTERDROP_DATA.
        mirror: Address of another folder that holds the same files.
        quiet: No progress bar.
    """
    if action == "list":
        print("\n".join(names()))
        return
    if name is None:
        raise DataError("fetch needs the name of a set, as in: afterdrop data fetch mnist")
    for path in fetch(name, folder, mirror=mirror, progress=not quiet):
        print(path)
