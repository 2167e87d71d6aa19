"""The folders of models: the user's cache of small models that are made on first use, and the sizes of weights."""

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


_FORMATS = ("*.safetensors", "*.bin", "*.pt")
"""Formats of weights. The first one that exists is loaded."""


def weight_bytes(model: str | Path) -> int | None:
    """Return the bytes of the weights of a folder or a downloaded hub model; None if unknown."""
    folder = _model_folder(str(model))
    if folder is None:
        return None
    for pattern in _FORMATS:
        files = [path for path in folder.rglob(pattern) if path.is_file()]
        parts = [
            path for path in files if not path.name.startswith("consolidated")
        ]  # Mistral's second copy of all weights
        if files:
            return sum(path.stat().st_size for path in parts or files)
    return None


def _model_folder(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not downloaded, no such name, or no library
        return None
