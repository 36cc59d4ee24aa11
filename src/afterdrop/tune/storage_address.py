"""The address of a study's database, and messages about it that do not contain its password."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy.engine import make_url

from afterdrop.data.shown_address import shown_address
from afterdrop.plain_text import first_line, one_line
from afterdrop.tune.checks import TuneError


class StorageAddress:
    """A URL of a database.

    Args:
        url: `sqlite:///FILE` or `postgresql://...`.

    Attributes:
        url: As given.
        shown: The scheme, host and database or file; without user, password and options.
        is_server: Whether it is a database server, not a file.
        folder: Of SQLite: the folder of the file.

    Raises:
        TuneError: If it is another or a malformed address; does not show a password.

    Example:
        >>> StorageAddress("postgresql://me:secret@host/studies").shown
        'postgresql://host/studies'
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # The name of a file may have characters that separate the parts of other addresses.
        is_file = url.startswith("sqlite:///")
        self.shown = one_line(url.partition("?")[0] if is_file else shown_address(url))
        if not re.match(r"sqlite:///[^?]|postgresql(\+\w+)?://", url):
            raise TuneError(
                f"storage={self.shown!r} must be sqlite:///FILE or postgresql://...; without "
                "--storage, the study is kept in a journal file in its folder"
            )
        try:
            parsed = make_url(url)
        except ValueError:  # the library's error shows the port, which may be part of a password
            raise self._malformed() from None
        self.is_server = not is_file
        # The library takes what follows an @ for the host, which its errors show.
        unclear = f"{parsed.host}{parsed.database}{url.partition('?')[2]}"
        if self.is_server and "@" in unclear:
            raise self._malformed()
        self.folder = Path(parsed.database or "").parent
        options = parsed.normalized_query
        values = {value for name in options if name != "host" for value in options[name]}
        self._secret = _pattern({parsed.password or "", *values}, options.keys())

    def reason(self, error: object) -> str:
        """The first line of an error of the database or its driver, without passwords."""
        return self._secret.sub("***", first_line(error))

    def _malformed(self) -> TuneError:
        return TuneError(
            f"storage={self.shown!r} is not a valid address; write it as "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, and in a password %40 for @, %3A for "
            ":, %2F for / and %3F for ?"
        )


def _pattern(values: set[str], names: Iterable[str]) -> re.Pattern[str]:
    """What finds the values as whole words, and the names of options in quotes.

    An unescaped `&` in a password makes the rest of it the name of an option, and drivers quote
    names that they do not know. Other words that happen to be names stay, such as `user`.
    """
    words = [rf"(?<!\w){re.escape(value)}(?!\w)" for value in sorted(values, key=len) if value]
    quoted = [f'(?<="){re.escape(name)}(?=")' for name in names]
    return re.compile("|".join([*reversed(words), *quoted]) or "(?!)")
