"""The folder of small models and profiles that are made on first use, in the user's cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the package's folder in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "teola-plugin"


def made_once(target: Path, marker: str, write: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `write` unless it has `marker`. It appears complete or not at all.

    Two processes may call this at once.
    """
    if (target / marker).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(building)
        building.chmod(0o755)
        building.rename(target)
    except OSError:
        if not (target / marker).exists():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target
