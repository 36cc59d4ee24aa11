"""Addresses of servers as messages show them: without what may be a password."""

import re

# A host, perhaps with a port and a path; a port that is not a number may be a password.
_PLACE = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]*)(:\d*)?(/[^:]*)?")


def shown_address(address: str) -> str:
    """The scheme, host and path of an address, without its user, password, query and fragment.

    Of an address that can be read in more than one way, only the scheme is shown, because any other
    part may belong to the password.

    Example:
        >>> shown_address("postgresql://me:secret@host:5432/studies?password=secret")
        'postgresql://host:5432/studies'
        >>> shown_address("postgresql://me:sec?ret@host/studies")
        'postgresql://***'
    """
    scheme, slashes, rest = address.partition("://")
    if not slashes or not re.fullmatch(r"[\w+.-]+", scheme):
        scheme, slashes, rest = "", "", address
    head = re.split("[?#]", rest)[0]
    place = head.rpartition("@")[2]
    safe = "@" not in rest[len(head) :] and _PLACE.fullmatch(place)
    return scheme + slashes + (place if safe else "***")
