"""What reached the models of a kit, and what is to go wrong there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """All calls since `clear`; the faults stay until they are taken back."""

    prompts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """With their role: that of a query, or of a document."""
    searches: int = 0
    broken_prompt: str | None = None
    """The model fails on it."""
    broken_text: str | None = None
    """The embedder fails on it."""
    broken_store: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.prompts, self.texts, self.searches = [], [], 0

    def mend(self) -> None:
        self.broken_prompt, self.broken_text, self.broken_store = None, None, False

    @property
    def fault(self) -> tuple[str | None, str | None, bool]:
        return self.broken_prompt, self.broken_text, self.broken_store

    def asked(self, prompt: str) -> None:
        with self.lock:
            self.prompts.append(prompt)

    def embedded(self, role: str, texts: Sequence[str]) -> None:
        with self.lock:
            self.texts += [f"{role}: {text}" for text in texts]

    def searched(self) -> None:
        with self.lock:
            self.searches += 1

    @property
    def reached(self) -> tuple[Counter[str], Counter[str]]:
        return Counter(self.prompts), Counter(self.texts)
