"""afterdrop data: which data sets there are, and downloading them on request."""

from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalPath, OptionalText
from afterdrop.data import fetch, names
from afterdrop.errors import DataError


def data(
    action: Annotated[Positional[Literal["list", "fetch"]], tyro.conf.arg(metavar="list|fetch")],
    name: Annotated[Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None,
    /,
    data: OptionalPath = None,
    mirror: OptionalText = None,
    quiet: bool = False,
) -> None:
    """List the data sets by name, or download one. Nothing is fetched unless you ask here.

    Downloads resume, are verified by SHA-256 and written atomically. PTB is licensed by the LDC
    and cannot be fetched; put its files into the folder yourself.

    For example:
      afterdrop data list
      afterdrop data fetch mnist --data DIR

    Args:
        action: list, or fetch NAME.
        name: mnist, wikitext-2 or enwik8.
        data: The folder of the named data sets; by default the environment variable AFTERDROP_DATA.
        mirror: Address of another folder that holds the same files.
        quiet: No progress bar.
    """
    if action == "list":
        print("\n".join(names()))
        return
    if name is None:
        raise DataError("fetch needs the name of a set, as in: afterdrop data fetch mnist")
    for path in fetch(name, data, mirror=mirror, progress=not quiet):
        print(path)
