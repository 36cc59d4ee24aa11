"""afterdrop data: list the data sets, and download them on request."""

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
    """List the named data sets, or download one. No other verb downloads anything.

    Downloads can be resumed, are verified by SHA-256 and written atomically. PTB is licensed by
    the LDC and cannot be downloaded; copy its files into the folder yourself.

    For example:
      afterdrop data list
      afterdrop data fetch mnist --data DIR

    Args:
        action: list, or fetch NAME.
        name: mnist, wikitext-2 or enwik8.
        data: Folder of the named data sets; by default the environment variable AFTERDROP_DATA.
        mirror: URL of another folder with the same files.
        quiet: Do not show a progress bar.
    """
    if action == "list":
        print("\n".join(names()))
        return
    if name is None:
        raise DataError("fetch needs the name of a data set, as in: afterdrop data fetch mnist")
    for path in fetch(name, data, mirror=mirror, progress=not quiet):
        print(path)
