"""Downloads one file over HTTP, resumably and with a bounded number of retries.

The bytes received so far are kept beside the target as `NAME.part`. A dropped, stalled or truncated
transfer is resumed with a Range request; if the server ignores Range, it starts over. The target
itself appears only after its content has passed the check. What a server may do is limited
(`limited_web.py`).
"""

import http.client
import os
import stat
import time
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from tqdm import tqdm

from afterdrop.data.limited_web import Limits, Refused, TooLarge, Unfinished, open_address
from afterdrop.errors import FileError

Result = TypeVar("Result")
_CHUNK = 1 << 16
# Some hosts of public data refuse urllib's default user agent.
_AGENT = "Mozilla/5.0 (compatible; afterdrop)"
_LONGEST_WAIT = 30.0
# Temporary conditions: time-outs, too many requests, errors of the server.
_TEMPORARY = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Patience:
    """Time-outs and retries of the download of a file.

    Attributes:
        timeout: Seconds without a byte after which a connection counts as stalled.
        retries: Attempts after the first, over all addresses.
        backoff: Seconds before the first retry; doubled for each further one, up to 30.
        total: Seconds for all attempts together, after which no more bytes are taken.
    """

    timeout: float = 30.0
    retries: int = 5
    backoff: float = 1.0
    total: float = 3600.0

    def wait(self, attempt: int) -> None:
        """Sleeps before the retry after `attempt` (from 0)."""
        time.sleep(min(self.backoff * 2**attempt, _LONGEST_WAIT))


def download(
    urls: Sequence[str],
    part: Path,
    accept: Callable[[bytes], Result],
    patience: Patience,
    progress: bool,
    largest: int,
) -> Result:
    """Downloads from the first of `urls` that gives the complete file.

    Args:
        urls: Addresses of the same file, in order of preference.
        part: Where the bytes so far are kept; the caller removes it after storing the result.
        accept: Called with the complete content; raises `FileError` if it is wrong.
        patience: Time-outs and retries.
        progress: Whether to show a bar.
        largest: Bytes that the file has at most.

    Returns:
        The result of `accept`.

    Raises:
        FileError: If no address gave the file within the retries (the message has the last reason
            of each), or if the disk cannot be written to.
    """
    remaining = list(urls)
    reasons: dict[str, str] = {}
    limits = Limits(largest, time.monotonic() + patience.total)
    for attempt in range(patience.retries + 1):
        url = remaining[attempt % len(remaining)]
        try:
            _transfer(url, part, patience.timeout, progress, limits)
        except Refused as error:
            reasons[url] = str(error)
            remaining.remove(url)
            if isinstance(error, TooLarge):
                part.unlink(missing_ok=True)  # its bytes are not those of the file
            if not remaining:
                break
            continue
        except Unfinished as error:
            reasons[url] = str(error)
            if time.monotonic() > limits.deadline:
                break
        else:
            try:
                return accept(part.read_bytes())
            except FileError as error:
                reasons[url] = str(error)
                part.unlink()  # complete but wrong, so nothing of it can be used
        if attempt < patience.retries:
            patience.wait(attempt)
    tried = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
    kept = f". {part} is kept, and the next call resumes from it" if part.exists() else ""
    raise FileError(
        f"could not download {part.name.removesuffix('.part')} ({tried}); try again later, or "
        f"pass mirror=URL of a folder with another copy{kept}"
    )


def _transfer(url: str, part: Path, timeout: float, progress: bool, limits: Limits) -> None:
    """Appends what is missing to `part`, or raises `Unfinished` or `Refused`."""
    have = part.lstat().st_size if os.path.lexists(part) else 0
    headers = {"User-Agent": _AGENT} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with open_address(url, headers, timeout, limits) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                have = 0  # the server ignored the range and sends everything
            elif _first_byte(response) != have:
                raise Unfinished("answered with another range than asked")
            total = None if response.length is None else have + response.length
            limits.check(total or 0)
            _append(response, part, have, total, progress, limits)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            _settle_range(error, part, have)
        elif error.code in _TEMPORARY:
            raise Unfinished(f"HTTP {error.code} {error.reason}") from error
        else:
            raise Refused(f"HTTP {error.code} {error.reason}") from error
    except TimeoutError as error:
        raise Unfinished(f"no byte for {timeout:g} s") from error
    except FileError:  # of the disk, not of the connection
        raise
    except (http.client.HTTPException, OSError) as error:
        raise Unfinished(str(error) or type(error).__name__) from error
    except ValueError as error:  # an address, or one that is redirected to, is malformed
        raise Refused(f"is or redirects to a malformed address ({error})") from error


def _append(
    response: http.client.HTTPResponse,
    part: Path,
    have: int,
    total: int | None,
    progress: bool,
    limits: Limits,
) -> None:
    with _open_part(part, have) as file, _bar(part, have, total, progress) as bar:
        # read1 returns what has arrived, so that a stalled connection loses nothing.
        while chunk := response.read1(_CHUNK):
            limits.check(have + len(chunk))
            try:
                file.write(chunk)
                file.flush()
            except OSError as error:
                raise FileError(f"cannot write {part}: {error}; make room there") from error
            have += len(chunk)
            bar.update(len(chunk))
    if total is not None and have < total:
        raise Unfinished(f"ended after {have:,} of {total:,} bytes")


def _bar(part: Path, have: int, total: int | None, progress: bool) -> "tqdm[NoReturn]":
    return tqdm(
        desc=part.name.removesuffix(".part"),
        initial=have,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress,
    )


def _open_part(part: Path, have: int) -> BinaryIO:
    # Through a symbolic link, a file elsewhere would be overwritten; a pipe would be waited for.
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    flags |= os.O_APPEND if have else os.O_TRUNC
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(part, flags, 0o644), "ab" if have else "wb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError("not a file")
        return file
    except OSError as error:
        remedy = ""
        if part.is_symlink():
            remedy = "; it is a symbolic link: remove it"
        elif part.is_fifo() or part.is_char_device() or part.is_block_device():
            remedy = "; it is a pipe or a device: remove it"
        raise FileError(f"cannot write {part}: {error}{remedy}") from error


def _first_byte(response: http.client.HTTPResponse) -> int | None:
    """The start in `Content-Range: bytes START-END/TOTAL`."""
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _settle_range(error: urllib.error.HTTPError, part: Path, have: int) -> None:
    """Handles a range beyond the end: the part is either the whole file or of another one."""
    total = error.headers.get("Content-Range", "").rpartition("/")[2]
    if total != str(have):
        part.unlink()
        raise Unfinished("the part kept from before does not fit; starting over") from error
