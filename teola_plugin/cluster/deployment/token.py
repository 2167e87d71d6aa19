"""The token that a pool's Ray cluster asks for: without one, whoever reaches a port of Ray's can run code behind it.

Ray reads it from the environment (`RAY_AUTH_TOKEN`, or the file `RAY_AUTH_TOKEN_PATH`). What a user has set there
stands, `RAY_AUTH_MODE=disabled` included.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as shim

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_taken: dict[str, str] = {}
"""What this process has put into its environment: no choice of the user's."""


def wanted() -> bool:
    """Whether a cluster of ours is to ask for a token. Only its user can say no."""
    return _given(MODE) in ("", "token")


def need(ray: Any) -> None:
    """Raises `EngineUnavailable` where Ray would leave a token unread, and let everybody in."""
    if wanted() and not shim.has_tokens(ray):
        raise EngineUnavailable(
            f"a pool's Ray cluster asks for a token, which Ray {ray.__version__} does not have.",
            hint="install ray>=2.52, or set RAY_AUTH_MODE=disabled if nobody else can reach this machine",
        )


def given() -> bool:
    """Whether the user has named a token."""
    return bool(_given(TOKEN) or _given(PATH))


def make(path: Path) -> Path:
    """A new token in a file that only its user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))
    return path


def environment(file: str) -> dict[str, str]:
    """What a process of Ray's needs in its environment: the user's token, or else that of the file, if there is one."""
    if not wanted():
        return {}
    if given():
        return {MODE: "token"}
    return {MODE: "token", PATH: file} if file else {}


def take(ray: Any, file: str) -> None:
    """From now on, this process shows that token. Ray reads its environment once, so it is told to do so again."""
    needed = environment(file)
    for name, value in _taken.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _taken.clear()
    new = {name: value for name, value in needed.items() if os.environ.get(name) != value}
    os.environ.update(new)
    _taken.update(new)
    shim.read_token_again(ray)


def _given(name: str) -> str:
    value = os.environ.get(name, "")
    return "" if value == _taken.get(name) else value.lower() if name == MODE else value
