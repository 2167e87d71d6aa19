"""Names of devices, by which passes tell which engines share hardware.

::

    KIND[:UNITS][@HOST]       cuda:0    cuda:0,1    cuda:GPU-5ebe9f43    cpu:0-3    cuda:0@4f1c02aa

Units are cards or cores, the host is a node of a cluster. Any other text (a server's address) is one device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

NUMBERED = frozenset({"cuda", "xpu", "mps"})
"""Kinds for which torch uses the first card if none is named."""
_NAME = re.compile(r"(?P<kind>[a-z]+)(:(?P<units>[\w-]+([,|][\w-]+)*))?(@(?P<host>[\w.-]+))?")
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Device:
    """A parsed name of a device."""

    kind: str
    units: frozenset[str] = frozenset()
    """Empty if no unit is named: all units of the kind may be used."""
    host: str = ""

    def __str__(self) -> str:
        units = ",".join(sorted(self.units, key=lambda unit: (len(unit), unit)))
        return self.kind + (f":{units}" if units else "") + (f"@{self.host}" if self.host else "")


@lru_cache(maxsize=1024)
def parse(name: str) -> Device:
    """Parse the name of a device: `cuda` means `cuda:0`, `cpu:0-2` means `cpu:0,1,2`."""
    match = _NAME.fullmatch(name)
    if match is None:
        return Device(name)
    kind, units, host = match["kind"], frozenset[str](), match["host"] or ""
    if match["units"]:
        parts = match["units"].replace("|", ",").split(",")
        units = frozenset(unit for part in parts for unit in _expand_range(part))
    elif kind in NUMBERED:
        units = frozenset({"0"})
    return Device(kind, units, host)


def _expand_range(part: str) -> list[str]:
    """Return the numbers of a range: `1-3` gives three. Any other text (a card's UUID) is returned as it is."""
    match = _RANGE.fullmatch(part)
    return [str(n) for n in range(int(match[1]), int(match[2]) + 1)] if match else [part]


def normalize(name: str) -> str:
    """Return the canonical name of a device; "" for no device."""
    return str(parse(name)) if name else ""


def share_hardware(one: str, other: str) -> bool:
    """Return True if two devices have a card or a core in common. `""` shares nothing."""
    if not one or not other:
        return False
    first, second = parse(one), parse(other)
    if (first.kind, first.host) != (second.kind, second.host):
        return False
    return first.units == second.units or not first.units.isdisjoint(second.units)


def on_host(name: str, host: str) -> str:
    """Return the name of a device on a node of a cluster. Names that are not local (a server's address) stay."""
    device = parse(name)
    local = device.kind in NUMBERED | {"cpu"} and not device.host
    return str(Device(device.kind, device.units, host)) if local else name
