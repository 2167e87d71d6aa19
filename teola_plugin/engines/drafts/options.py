"""What is drafted: the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from teola_plugin.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class Drafts:
    """The options of drafting. The text of an answer is the same with any of them.

    Attributes:
        tokens: Maximum number of tokens for one request and step (1 to 64).
        lookup: Draft from the request's own tokens, too.
        recent: Number of tokens of recent outputs that are kept for each app and tenant; 0 for none.
        budget: Maximum number of tokens for one step of all requests; 0 for the calibrated one (`tokens` before that).
    """

    tokens: int = 16
    lookup: bool = True
    recent: int = 16_384
    budget: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.lookup, bool):
            raise ConfigError(f"drafts: lookup is {self.lookup!r}.", hint="give true or false")
        if not _whole(self.tokens) or not 1 <= self.tokens <= 64:
            raise ConfigError(f"drafts: tokens is {self.tokens!r}.", hint="give 1 to 64; 16 is the default")
        for name in ("recent", "budget"):
            given = getattr(self, name)
            if not _whole(given) or given < 0:
                raise ConfigError(f"drafts: {name} is {given!r}.", hint="give a whole number, 0 or more")


def drafts_of(given: str | bool | Mapping[str, Any] | Drafts) -> Drafts | None:
    """Return the options for `"auto"`, `"off"` or a mapping; None for no drafts. Raise TeolaError if invalid."""
    if isinstance(given, Drafts):
        return given
    if isinstance(given, Mapping):
        names = [field.name for field in fields(Drafts)]
        for name in given:
            if name not in names:
                raise unknown_name("option of drafts", str(name), names)
        return Drafts(**given)
    if given is False:  # YAML reads `off` so
        return None
    if given not in ("auto", "off"):
        raise unknown_name("value of drafts", str(given), ["auto", "off"])
    return Drafts() if given == "auto" else None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
