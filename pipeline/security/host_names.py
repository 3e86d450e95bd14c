"""Host names and addresses, as a `Host` header and settings give them.

The gateway and the dashboard answer only requests that were addressed to a name of their own (`Host` header), so that a
web page can't reach them through a name that it made point here."""

from __future__ import annotations

import ipaddress
import re

_AUTHORITY = re.compile(r"([A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def name_in_host(header: str) -> str | None:
    """Return the name or address in a `Host` header, in lower case, without port, brackets and last dot.

    Returns `None` unless the header is `name` or `name:port` with a port from 1 to 65535. Anything else, such as
    `user@name`, two programs could read in two ways."""
    match = _AUTHORITY.fullmatch(header)
    if match is None or (match[2] is not None and not 1 <= int(match[2]) <= 65535):
        return None
    if header.startswith("["):
        return match[1][1:-1].lower() if address_of(match[1][1:-1]) else None
    return match[1].lower().removesuffix(".")


def address_of(host: str) -> Address | None:
    """Return a host's IP address; `None` if it is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether a name or address is of the loopback interface: `localhost`, `127.0.0.0/8` or `::1`."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback
