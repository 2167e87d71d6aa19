"""The user's settings of drafting."""

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
        """Raise `ConfigError` for an option of the wrong type or outside its range."""
        if not isinstance(self.lookup, bool):
            raise ConfigError(f"drafts: lookup is {self.lookup!r}.", hint="give true or false")
        if not _is_whole_number(self.tokens) or not 1 <= self.tokens <= 64:
            raise ConfigError(f"drafts: tokens is {self.tokens!r}.", hint="give 1 to 64; 16 is the default")
        for name in ("recent", "budget"):
            value = getattr(self, name)
            if not _is_whole_number(value) or value < 0:
                raise ConfigError(f"drafts: {name} is {value!r}.", hint="give a whole number, 0 or more")


def drafts_of(setting: str | bool | Mapping[str, Any] | Drafts) -> Drafts | None:
    """Return the options for `"auto"`, `"off"` or a mapping; None for no drafts. Raise TeolaError if invalid."""
    if isinstance(setting, Drafts):
        return setting
    if isinstance(setting, Mapping):
        names = [field.name for field in fields(Drafts)]
        for name in setting:
            if name not in names:
                raise unknown_name("option of drafts", str(name), names)
        return Drafts(**setting)
    if setting is False:  # YAML reads `off` as false
        return None
    if setting not in ("auto", "off"):
        raise unknown_name("value of drafts", str(setting), ["auto", "off"])
    return Drafts() if setting == "auto" else None


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
