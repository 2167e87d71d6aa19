"""The pieces of one result, as they come: for readers, and for retries, which must repeat what was read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from teola_plugin.errors import EngineError
from teola_plugin.requests.payloads import Generation
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.handles import PieceLog


@dataclass(slots=True, eq=False)
class ResultStream:
    """The pieces of the result of one request, and their readers."""

    request_id: str
    engine: str
    is_coarse: bool = False
    """True if the request was sent as one whose pieces nobody reads: they need not add up to its text."""
    is_passed_on: bool = False
    """True if its pieces go where they cannot be taken back, besides its readers: into items, to another process."""
    is_prefilled: bool = False
    """True once the prompt is computed."""
    cuts: tuple[int, ...] = ()
    """Lengths of the pieces in which a coarse text would have come, in characters. Known at its end."""
    pieces: list[Piece] = field(default_factory=list)
    """All pieces so far, for readers that come late."""
    piece_count: int = 0
    """Number of pieces that came, including those of earlier attempts."""
    first_characters: int = 0
    first_tokens: int = 0
    """Length of the first piece."""
    text: str = ""
    """What was streamed so far."""
    unrepeated: int = 0
    """Number of characters at the end of `text` that a retry has yet to repeat."""
    readers: list[PieceLog] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Add a piece for all readers."""
        if not self.piece_count:
            self.first_characters, self.first_tokens = len(piece.text), piece.tokens
        self.piece_count += 1
        self._append(piece)

    def _append(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for reader in self.readers:
            reader.append(piece)

    def restart(self) -> None:
        """Expect everything that came so far once more, from a retry."""
        self.is_prefilled, self.unrepeated = False, len(self.text)

    def new_part(self, piece: Piece) -> Piece:
        """Return the part of a piece that was not delivered before the retry.

        If the retry produces different text, what came before is forgotten. Raises `EngineError` if somebody may have
        acted on that.
        """
        if self.unrepeated:
            position = len(self.text) - self.unrepeated
            repeated = self.text[position : position + len(piece.text)]
            if piece.text.startswith(repeated):
                self.unrepeated -= len(repeated)
                piece = replace(piece, text=piece.text[len(repeated) :])
            else:
                self._forget_from(position)
        if piece.text:
            self.text += piece.text
        return piece

    def take_text_of_retry(self, value: object) -> None:
        """Make sure that the result of a retry begins with what was delivered. Raises as `new_part` does."""
        if self.text and isinstance(value, Generation) and not value.text.startswith(self.text):
            self._forget_from(0)
            self.pieces = [Piece(self.request_id, value.text, value.completion_tokens)]
            self.text = value.text

    def _forget_from(self, position: int) -> None:
        if self.is_seen:
            raise EngineError(
                f"request {self.request_id} was done again, and its text is another one than that which was passed on.",
                engine=self.engine,
                hint="ask again; for equal texts, sample greedily or with a seed, on instances of one kind",
            )
        self.close()
        self.readers = []
        self.text, self.unrepeated = self.text[:position], 0
        self.pieces = [Piece(self.request_id, self.text)] if self.text else []

    def replay(self, reader: PieceLog) -> None:
        """Give a reader all pieces so far."""
        for piece in self.pieces:
            reader.append(piece)

    def add_rest(self, value: object) -> None:
        """Give readers the rest of a coarse text, which has ended."""
        if self.is_coarse and isinstance(value, Generation):
            streamed = "".join(piece.text for piece in self.pieces)
            if value.text.startswith(streamed):
                for rest in self._cut(value.text, len(streamed)):
                    self._append(Piece(self.request_id, rest))

    def _cut(self, text: str, start: int) -> Iterator[str]:
        """Yield the text from `start` on in pieces that end where the cuts say."""
        for end in (*itertools.accumulate(self.cuts), len(text)):
            if start < end <= len(text):
                yield text[start:end]
                start = end

    def close(self) -> None:
        """End the stream for all readers."""
        for reader in self.readers:
            reader.close()

    def clear(self) -> None:
        """Let everything go."""
        self.pieces, self.readers, self.text = [], [], ""

    @property
    def is_seen(self) -> bool:
        """True if somebody may have acted on what came so far."""
        return self.is_passed_on or self.is_read

    @property
    def is_read(self) -> bool:
        """True if somebody takes the pieces for the result as they come."""
        return any(not reader.tentative for reader in self.readers)
