"""Folders of small models: two that come with the package, and those that are made on first use in the user's cache.

`examples/demo_model` says how the two were made and what they can.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from teola_plugin.errors import EngineUnavailable

FOLDER = Path(__file__).parent / "bundled" / "models"
"""The models that come with the package."""


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


def llm_folder() -> Path:
    """Return the folder of a Llama of 4 million parameters for RAG pipelines. Raise EngineUnavailable."""
    return _model_folder("demo-llm")


def reranker_folder() -> Path:
    """Return the folder of a cross-encoder of 0.9 million parameters. Raise EngineUnavailable."""
    return _model_folder("demo-reranker")


def _model_folder(name: str) -> Path:
    """Return the folder of a model that comes with the package. Raise `EngineUnavailable` if it is missing."""
    folder = FOLDER / name
    if not (folder / "model.safetensors").is_file():
        raise EngineUnavailable(
            f"the bundled model {name!r} is not in {folder}.",
            engine=name,
            hint="install teola-plugin again, or name a model of your own; `make model` trains these anew",
        )
    return folder
