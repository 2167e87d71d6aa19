"""A stand-in for `torch.cuda` on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30


@dataclass
class FakeCuda:
    """GPUs with memory. `free` is the free memory of each card and `total` that of any card, in GiB."""

    free: list[float]
    total: float = 80.0
    empty_cache_calls: int = 0
    """Number of calls of `empty_cache`."""
    queried_cards: list[int] = field(default_factory=list)
    """Index of the card in each call of `mem_get_info`."""

    def is_available(self) -> bool:
        return bool(self.free)

    def device_count(self) -> int:
        return len(self.free)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.queried_cards.append(index)
        if not self.free[index]:
            raise RuntimeError("CUDA error: out of memory")  # of the context that asking opens
        return int(self.free[index] * GIB), int(self.total * GIB)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"Card {index}", total_memory=int(self.total * GIB))

    def empty_cache(self) -> None:
        self.empty_cache_calls += 1
