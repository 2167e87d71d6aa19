"""One batch computed in several threads: a forward pass of a small model cannot keep several cores busy, two can."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from teola_plugin.engines.sentence_transformers.torch_worker import use_threads

T = TypeVar("T", bound=Sized)
V = TypeVar("V")
_MOST = 8
"""More threads than that wait for Python's lock."""


class Replicas:
    """Threads with an equal share of `threads` cores each, and a twin of the model: same weights, own tokenizer.

    A tokenizer of Hugging Face must not be used by two threads (huggingface/tokenizers#537, "Already borrowed"). Twins
    are made with the first batch: many engines never see a large one.
    """

    def __init__(self, model: Any, threads: int) -> None:
        self.count = min(threads, _MOST)
        self._models = [model]
        share = threads // self.count
        self._threads = ThreadPoolExecutor(self.count, "teola-replica", initializer=lambda: use_threads(share))

    def compute(self, work: Callable[[Any, list[T]], Sequence[V]], items: Sequence[T]) -> list[V]:
        """`work(model, part)` for parts of like lengths; the values in the order of `items`."""
        self._models += [twin(self._models[0]) for _ in range(self.count - len(self._models))]
        order = sorted(range(len(items)), key=lambda at: len(items[at]))
        parts = [order[first :: self.count] for first in range(self.count)]
        values = self._threads.map(work, self._models, ([items[at] for at in part] for part in parts))
        found = dict(zip((at for part in parts for at in part), (v for part in values for v in part), strict=True))
        return [found[at] for at in range(len(items))]

    def close(self) -> None:
        self._threads.shutdown()


def twin(model: Any) -> Any:
    """A deep copy that shares the weights."""
    weights = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)
