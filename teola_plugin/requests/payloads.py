"""What engines are asked for and what they give back, kind by kind. Framework-neutral and picklable.

| kind                | payload of one request | value                          |
|---------------------|------------------------|--------------------------------|
| EMBEDDING           | `EmbedText`            | sequence of floats             |
| INGESTION           | `IngestRow`            | the row's id (str)             |
| SEARCHING           | `SearchVector`         | tuple of `Hit`, best first     |
| SEARCHING           | `SearchText`           | tuple of `Hit`, best first     |
| RERANKING           | `ScorePair`            | float, higher is better        |
| PARTIAL_PREFILLING  | `Warmup`               | `Warmed`                       |
| PREFILLING, FULL_.. | `Generate`             | `Generation` (and its decodings) |
| TOOL                | `CallTool`             | what the function returns      |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

Vector = Sequence[float]

UNKNOWN = "\ue000"
"""Stands in the prompt of a `Warmup` for text that is not known yet; what comes before the first can be prefilled."""


@dataclass(frozen=True, slots=True)
class EmbedText:
    text: str
    role: Literal["query", "document"] = "query"
    """Kept apart and never merged: some models prefix the two differently."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document. `id` is stable: the same content in the same collection gives the same id."""

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class IngestRow:
    collection: str
    chunk: Chunk
    vector: Vector = field(hash=False)


class OneOf(NamedTuple):
    """A condition of a filter: a value of metadata equals one of `values`; with `negated`, it equals none of them."""

    values: tuple[Any, ...]
    negated: bool = False

    @classmethod
    def from_condition(cls, condition: Any) -> OneOf:
        """Return a condition of `SearchVector.filter` as a `OneOf`, also where it is a single value."""
        return condition if isinstance(condition, OneOf) else cls((condition,))


@dataclass(frozen=True, slots=True)
class SearchVector:
    collection: str
    vector: Vector = field(hash=False)
    k: int = 4
    filter: tuple[tuple[str, Any], ...] = ()
    """Metadata keys, each with the value that it must have or a `OneOf`; all conditions hold for every hit.

    Values are equal as in JSON: 1 equals 1.0, but neither True nor "1". A key that is missing has the value None.
    """


@dataclass(frozen=True, slots=True)
class SearchText:
    """A search by words: of the web, or of documents by full text."""

    query: str
    k: int = 4


@dataclass(frozen=True, slots=True)
class Hit:
    id: str
    """Of a web search: the address."""
    text: str
    metadata: Mapping[str, Any]
    score: float
    """Higher is better. Of a search by vector: cosine similarity, in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class CallTool:
    """A call of a function that an engine has under this name."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """By name."""
    read_only: bool = False
    """Whether its author declares that it changes nothing: it may be called early, and again when an engine died."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a collection held, as its store counts: a search is still true while the version is the same."""

    identity: str
    """Of the collection: another one after it was deleted and made anew, or where the counter began anew."""
    counter: int
    """Grows with every change, whichever process, connection or program makes it."""


class Stored(Protocol):
    """What searches and look-ups give: a `Hit` or a `Chunk`."""

    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ScorePair:
    query: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Chat messages, or plain text when `messages` is empty.

    A prompt that is to be answered (`Generate`) is whole, whatever its text: users may write the character of
    `UNKNOWN`, too. In one that is to be warmed up, the first ends what is known: a user's makes it shorter, not wrong.
    """

    carried: ClassVar[bool] = False
    """Whether it is a request of the user's own client, which an engine carries as it is."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: str = ""
    """JSON text of the tools that the model is told of by its chat template, as OpenAI describes them."""

    def flat(self) -> str:
        """The text of all parts, for estimates and for engines without a chat template."""
        tools = f"tools: {self.tools}\n" if self.tools else ""
        return self.text or tools + "\n".join(f"{m.role}: {m.content}" for m in self.messages) + "\nassistant:"

    def known(self) -> str:
        """Of a prompt to be warmed up: `flat()` up to the first unknown slot."""
        return self.flat().split(UNKNOWN, 1)[0]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode. The defaults are greedy, so that equal prompts give equal answers."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    """JSON text of a schema that the output must follow; empty for free text."""
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Warmup:
    """Prefill the known part of a prompt, so that the whole prompt finds it cached (partial prefilling)."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Warmed:
    tokens: int
    cached_tokens: int = 0
    """Those of them that were in the prefix cache before, as far as the engine tells."""


class AnswerForm(Enum):
    """A way in which an answer is sent."""

    WHOLE = "whole"
    """In one response."""
    STREAMED = "streamed"
    """In pieces, as it is written."""
    UNKNOWN = "unknown"
    """One of the two, decided when the answer is asked for."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Generate:
    prompt: Prompt
    sampling: Sampling = Sampling()
    form: AnswerForm | None = field(default=None, compare=False)
    """The form in which the original asks for the answer with this very request: in the other form it sends another
    one. None where one request serves both."""

    def with_unknown_form(self) -> Generate:
        """Return the request of an original that may ask in the other form, too."""
        return self if self.form is None else replace(self, form=AnswerForm.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Generation:
    text: str
    finish_reason: str = "stop"
    """`stop` or `length`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache. An engine that always tells says so with an
    attribute, `tells_cached = True`; of another one, 0 may mean that it does not know."""
    drafted: int = field(default=0, compare=False)
    """Tokens that the engine has drafted for it, and had the model verify."""
    accepted: int = field(default=0, compare=False)
    """Those of them that the model would have written itself: part of its text."""
