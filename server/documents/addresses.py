"""Which addresses of the net may be asked on behalf of a client: those that anybody could ask, and no others. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_REFUSED_4 = (
    IPv4Network("192.0.0.0/24"),  # of protocols; some versions of Python take it for anybody's
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("168.63.129.16/32"),  # a cloud's own services, at an address that looks like anybody's
)
_UNICAST_6 = IPv6Network("2000::/3")
_REFUSED_6 = (
    IPv6Network("2001::/23"),  # Teredo, ORCHID and the like
    IPv6Network("2002::/16"),  # 6to4: holds an IPv4 address
    IPv6Network("2620:4f:8000::/48"),
    IPv6Network("3fff::/20"),  # documentation
    IPv6Network("5f00::/16"),
)
_NUMBER = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)\.?$")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")


def is_public(address: str) -> bool:
    """Whether it is a host's of the public internet: neither of this machine, nor of a network of its own, nor of many
    hosts, nor one that stands for another address."""
    if "%" in address:
        return False
    try:
        found = ip_address(address)
    except ValueError:
        return False
    return _public_4(found) if isinstance(found, IPv4Address) else _public_6(found)


def _public_4(address: IPv4Address) -> bool:
    special = address.is_multicast or address.is_reserved or any(address in one for one in _REFUSED_4)
    return address.is_global and not special


def _public_6(address: IPv6Address) -> bool:
    if address.ipv4_mapped is not None or address not in _UNICAST_6:
        return False
    isatap = (int(address) >> 32) & 0xFFFFFFFF in (0x00005EFE, 0x02005EFE)  # holds an IPv4 address, too
    return address.is_global and not isatap and not any(address in one for one in _REFUSED_6)


def name_of_host(host: str) -> str:
    """As it is compared: lower case, without the last dot. Empty for what is neither a name nor a plain address, such
    as numbers in other bases, which resolvers read in ways of their own."""
    host = host.strip("[]").lower().removesuffix(".")
    try:
        return str(ip_address(host)) if "%" not in host else ""
    except ValueError:
        pass
    if len(host) > 253 or not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
        return ""
    return host


def is_named(host: str, allowed: Sequence[str]) -> bool:
    """Whether the settings name it. `*.example.org` is whatever lies below, not `example.org` itself."""
    return any(one in ("*", host) or (one.startswith("*.") and host.endswith(one[1:])) for one in allowed)
