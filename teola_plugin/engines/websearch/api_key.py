"""A key of a service: never shown, never pickled."""

from __future__ import annotations

import os
from typing import Any


class ApiKey:
    """A secret key for request headers. A copy in another process reads the environment variable `variable` there."""

    __slots__ = ("_value", "variable")

    def __init__(self, value: str, variable: str = "") -> None:
        self._value, self.variable = value.strip(), variable

    @classmethod
    def of_environment(cls, variable: str) -> ApiKey:
        """Create the key from an environment variable; an empty key if it is not set."""
        return cls(os.environ.get(variable, "") if variable else "", variable)

    @property
    def value(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "ApiKey(***)" if self._value else "ApiKey(none)"

    def __reduce__(self) -> Any:
        return ApiKey.of_environment, (self.variable,)
