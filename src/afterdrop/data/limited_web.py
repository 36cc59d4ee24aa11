"""Connections over HTTP that end at a number of bytes and a time, whatever the server sends.

The limits count every byte that arrives: also those of status lines, headers, trailers and the
bodies of redirects, which the standard library reads to their end. Redirects are followed to http
and https addresses only.
"""

import functools
import http.client
import io
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SCHEMES = ("http", "https")


class Unfinished(Exception):
    """A transfer that ended early; the next attempt may finish it."""


class Refused(Exception):
    """An address that will never give the file."""


class TooLarge(Refused):
    """An address that sends more bytes than the file can have."""


@dataclass(frozen=True)
class Limits:
    """Where a transfer ends at the latest: bytes of the file, and time on the monotonic clock."""

    size: int
    deadline: float

    def check(self, have: int) -> None:
        """Raises `TooLarge` or `Unfinished` beyond the limits."""
        if have > self.size:
            raise TooLarge(f"sends more than {self.size:,} bytes, the limit for this file")
        if time.monotonic() > self.deadline:
            raise Unfinished("took longer than the total time for this file")


def open_address(url: str, headers: dict[str, str], timeout: float, limits: Limits) -> Any:
    """Sends a request and returns the response, as `urllib.request.urlopen` does.

    Args:
        url: The address.
        headers: Headers of the request.
        timeout: Seconds without a byte after which it fails with a `TimeoutError`.
        limits: What the server may send.

    Raises:
        Refused: If it is, or redirects to, another address than of http and https.
        Unfinished: If it takes too long, here or while the response is read.
        TooLarge: If it sends too much, here or while the response is read.
    """
    if urlsplit(url).scheme not in SCHEMES:
        raise Refused("is not an http or https address")
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(_WebRedirects, _Http(limits), _Https(limits))
    return opener.open(request, timeout=timeout)


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https addresses only."""

    def redirect_request(self, *arguments: Any) -> urllib.request.Request | None:
        address = arguments[-1]
        if urlsplit(address).scheme not in SCHEMES:
            raise Refused(f"redirects to {address!r:.80}, which is not an http or https address")
        return super().redirect_request(*arguments)


class _LimitedOpening(urllib.request.AbstractHTTPHandler):
    """Opens connections whose responses are limited."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._response = functools.partial(_Response, limits)

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
        def limited(*arguments: Any, **options: Any) -> Any:
            connection = http_class(*arguments, **options)
            connection.response_class = self._response
            return connection

        return super().do_open(limited, req, **http_conn_args)


class _Http(_LimitedOpening, urllib.request.HTTPHandler):
    pass


class _Https(_LimitedOpening, urllib.request.HTTPSHandler):
    pass


class _Response(http.client.HTTPResponse):
    def __init__(self, limits: Limits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fp = io.BufferedReader(_Arriving(self.fp.detach(), limits))


class _Arriving(io.RawIOBase):
    """The bytes of a connection as they arrive, within the limits."""

    def __init__(self, connection: io.RawIOBase, limits: Limits) -> None:
        self._connection, self._limits, self._count = connection, limits, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        size = self._connection.readinto(buffer)
        self._count += size or 0
        self._limits.check(self._count)
        return size

    def close(self) -> None:
        self._connection.close()
        super().close()
