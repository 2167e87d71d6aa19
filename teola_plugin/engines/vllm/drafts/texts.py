"""Texts that came with a request, as tokens: in the worker, and once somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from teola_plugin.engines.drafts.skeleton import with_gaps
from teola_plugin.graph import GAP

Encode = Callable[[str], Sequence[int]]
_KEPT = 1024
"""Forms whose tokens are kept."""


class Encoder:
    """An encoder with the model's tokenizer. The tokens of forms, which have gaps, are cached, as forms recur."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._forms: dict[str, Sequence[int]] = {}

    def __call__(self, text: str) -> Sequence[int]:
        """Return the tokens of a text; () if the tokenizer rejects it."""
        try:
            return self._form(text) if GAP in text else self._encode(text)
        except Exception:  # tokenizers have errors of their own; a request without drafts is none
            return ()

    def _form(self, text: str) -> Sequence[int]:
        found = self._forms.get(text)
        if found is None:
            if len(self._forms) >= _KEPT:
                self._forms.clear()
            found = self._forms[text] = with_gaps(text, GAP, self._encode)
        return found


class Encoded(Sequence[Sequence[int]]):
    """The tokens of each text, made whenever it is asked for."""

    def __init__(self, texts: Sequence[str], encode: Encode) -> None:
        self._texts, self._encode = texts, encode

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, at: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, at: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(at, slice):
            return Encoded(self._texts[at], self._encode)
        return self._encode(self._texts[at])

    def __iter__(self) -> Iterator[Sequence[int]]:
        return map(self._encode, self._texts)
