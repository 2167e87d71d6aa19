"""The GPUs that this process sees, and the memory for weights. The one place where engines ask torch about devices."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teola_plugin.graph.device import parse

GIB = 1 << 30
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. `index` counts those that this process sees; memory is in bytes."""

    index: int
    name: str
    total: int
    free: int

    @property
    def device(self) -> str:
        """The card's name in this process, as torch has it."""
        return f"cuda:{self.index}"

    def __str__(self) -> str:
        return f"{self.device} ({self.name}, {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free)"


def cuda() -> Any:
    """Return `torch.cuda`. Tests replace this function."""
    import torch

    return torch.cuda


def visible_cards() -> tuple[Card, ...]:
    """Return the GPUs; () without torch or a GPU. Opens a CUDA context on each, which takes some 100 MB."""
    try:
        torch_cuda = cuda()
    except ImportError:
        return ()
    if not torch_cuda.is_available():
        return ()
    return tuple(_card(torch_cuda, index) for index in range(torch_cuda.device_count()))


def _card(torch_cuda: Any, index: int) -> Card:
    """Return name and memory of a GPU; 0 bytes free if the GPU has not even room for a CUDA context."""
    properties = torch_cuda.get_device_properties(index)
    try:
        free, total = torch_cuda.mem_get_info(index)
    except RuntimeError:  # not even room for a context
        free, total = 0, properties.total_memory
    return Card(index, properties.name, total, free)


def gpu_version(device: str) -> dict[str, str]:
    """Return the GPU's name for an engine's `versions`, because measurements on one GPU do not hold for another."""
    indices = parse(device).units if device.startswith("cuda") else ()
    names = {cuda().get_device_properties(int(index)).name for index in indices}
    return {"gpu": ", ".join(sorted(names))} if names else {}


def why_none() -> str:
    """Return the reason why torch sees no GPU, as the end of a sentence."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    hidden = os.environ.get(VISIBLE)
    return "torch sees no GPU" + (f" ({VISIBLE}={hidden!r})" if hidden is not None else "")


def release(device: str) -> None:
    """Give the memory that torch keeps for later back to the card: another engine may want it.

    Does nothing for a device that is no GPU. Memory of tensors that are still referenced is not released.
    """
    if device.startswith("cuda"):
        cuda().empty_cache()


def device_name(indices: Iterable[int]) -> str:
    """Return the name of cards of this process for a profile (see `graph.device`).

    Names of different cards differ, also if two processes see them under the same numbers.
    """
    return "cuda:" + ",".join(visible_as(indices))


def visible_as(indices: Iterable[int]) -> list[str]:
    """Return the values of `CUDA_VISIBLE_DEVICES` with which a child process sees these cards only.

    `indices` count the cards that this process sees. If `CUDA_VISIBLE_DEVICES` is set here, they are translated to its
    entries, which may be numbers or UUIDs.
    """
    visible = os.environ.get(VISIBLE)
    units = [unit.strip() for unit in visible.split(",")] if visible else []
    return [units[index] if index < len(units) else str(index) for index in indices]


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
    """Return the folder of a model: the path itself, or the cached download of a name on the hub. None if it is not
    here.

    Nothing is downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not downloaded, no such name, or no library
        return None
