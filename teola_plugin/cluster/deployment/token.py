"""The token that a pool's Ray cluster asks for: without one, whoever reaches a port of Ray's can run code on it.

Ray reads it from the environment (`RAY_AUTH_TOKEN`, or the file `RAY_AUTH_TOKEN_PATH`). The user's own settings there
are kept, `RAY_AUTH_MODE=disabled` included.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as shim

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_own_values: dict[str, str] = {}
"""Values that this process has put into its environment, which are not the user's choice."""


def is_wanted() -> bool:
    """Return True if a cluster of ours asks for a token. Only the user can decide against it."""
    return _user_value(MODE) in ("", "token")


def check_support(ray: Any) -> None:
    """Raise `EngineUnavailable` if this version of Ray would ignore a token and let everybody in."""
    if is_wanted() and not shim.has_tokens(ray):
        raise EngineUnavailable(
            f"a pool's Ray cluster asks for a token, which Ray {ray.__version__} does not have.",
            hint="install ray>=2.52, or set RAY_AUTH_MODE=disabled if nobody else can reach this machine",
        )


def is_set_by_user() -> bool:
    """Return True if the user has named a token."""
    return bool(_user_value(TOKEN) or _user_value(PATH))


def create_file(path: Path) -> Path:
    """Write a new token to a file that only its user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token_file:
        token_file.write(secrets.token_hex(32))
    return path


def environment(file: str) -> dict[str, str]:
    """Return the variables that a process of Ray's needs for the user's token, or else for that of the file, if any."""
    if not is_wanted():
        return {}
    if is_set_by_user():
        return {MODE: "token"}
    return {MODE: "token", PATH: file} if file else {}


def use_token(ray: Any, file: str) -> None:
    """Show this token from now on. Ray reads its environment once, so it is told to do so again."""
    new_values = environment(file)
    for name, value in _own_values.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _own_values.clear()
    changed = {name: value for name, value in new_values.items() if os.environ.get(name) != value}
    os.environ.update(changed)
    _own_values.update(changed)
    shim.read_token_again(ray)


def _user_value(name: str) -> str:
    value = os.environ.get(name, "")
    return "" if value == _own_values.get(name) else value.lower() if name == MODE else value
