"""Which servers are nobody else's: those of this machine, and of a private network."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Ends of names that no public name has (RFC 6761, 6762, 8375; `.internal` is reserved by ICANN)."""


def is_private(url: str) -> bool:
    """Whether an address is of this machine or a private network, by its spelling alone: nothing is looked up.

    Names without a dot are: containers of one compose file or cluster find each other by such ones.
    """
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        known = {socket.gethostname().lower(), socket.getfqdn().lower()} if "." in host else set()
        return bool(host) and ("." not in host or host.endswith(_PRIVATE) or host in known)
