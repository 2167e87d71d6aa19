"""How much memory a model's weights take, as far as its files tell."""

from __future__ import annotations

from pathlib import Path

_FORMATS = ("*.safetensors", "*.bin", "*.pt")
"""The first that is there is the one that is loaded."""


def weight_bytes(model: str | Path) -> int | None:
    """Bytes of the weights of a folder, or of a hub model that has been downloaded; None where that cannot be told."""
    folder = _folder(str(model))
    if folder is None:
        return None
    for pattern in _FORMATS:
        files = [path for path in folder.rglob(pattern) if path.is_file()]
        parts = [path for path in files if not path.name.startswith("consolidated")]  # the whole again, of Mistral's
        if files:
            return sum(path.stat().st_size for path in parts or files)
    return None


def _folder(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not downloaded, no such name, no library: all the same here
        return None
