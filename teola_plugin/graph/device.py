"""Names of devices: by them passes know which engines disturb each other.

::

    KIND[:UNITS][@HOST]       cuda:0    cuda:0,1    cuda:GPU-5ebe9f43    cpu:0-3    cuda:0@4f1c02aa

Units are cards or cores, the host is a node of a cluster. Any other text (a server's address) is a device of that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

NUMBERED = frozenset({"cuda", "xpu", "mps"})
"""Kinds of which torch takes the first card where none is named."""
_NAME = re.compile(r"(?P<kind>[a-z]+)(:(?P<units>[\w-]+([,|][\w-]+)*))?(@(?P<host>[\w.-]+))?")
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Device:
    """A name, taken apart."""

    kind: str
    units: frozenset[str] = frozenset()
    """Empty where nobody says which: all of the kind, wherever the system puts the work."""
    host: str = ""

    def __str__(self) -> str:
        units = ",".join(sorted(self.units, key=lambda unit: (len(unit), unit)))
        return self.kind + (f":{units}" if units else "") + (f"@{self.host}" if self.host else "")


@lru_cache(maxsize=1024)
def parse(name: str) -> Device:
    """`cuda` is `cuda:0`, `cpu:0-2` is `cpu:0,1,2`."""
    found = _NAME.fullmatch(name)
    if found is None:
        return Device(name)
    kind, units, host = found["kind"], found["units"] or "", found["host"] or ""
    given = (
        frozenset(unit for part in units.replace("|", ",").split(",") for unit in _each(part)) if units else frozenset()
    )
    return Device(kind, given or (frozenset({"0"}) if kind in NUMBERED else given), host)


def _each(part: str) -> list[str]:
    """`1-3` as its three numbers; a card's UUID, which has dashes, too, as it is."""
    found = _RANGE.fullmatch(part)
    return [str(n) for n in range(int(found[1]), int(found[2]) + 1)] if found else [part]


def normal(name: str) -> str:
    """The one name of a device; empty for none."""
    return str(parse(name)) if name else ""


def share_hardware(one: str, other: str) -> bool:
    """Whether what runs on both takes turns: one device, or a card or a core in common. `""` shares nothing."""
    if not one or not other:
        return False
    first, second = parse(one), parse(other)
    if (first.kind, first.host) != (second.kind, second.host):
        return False
    return first.units == second.units or not first.units.isdisjoint(second.units)


def on_host(name: str, host: str) -> str:
    """The device of that name on a node of a cluster. Other names (a server's address) are the same everywhere."""
    device = parse(name)
    local = device.kind in NUMBERED | {"cpu"} and not device.host
    return str(Device(device.kind, device.units, host)) if local else name
