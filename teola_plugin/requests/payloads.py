"""The request, which is the unit of work that is sent to an engine: its payload and its value, by kind of primitive.

All of them are framework-neutral and picklable.

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

An engine sends pieces of a streamed value, and exactly one end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind

Vector = Sequence[float]

UNKNOWN = "\ue000"
"""A placeholder in the prompt of a `Warmup` for text that is not known yet; the text before the first is prefilled."""


@dataclass(frozen=True, slots=True)
class EmbedText:
    text: str
    role: Literal["query", "document"] = "query"
    """Requests of different roles are never merged: some models prefix the two differently."""


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
        """Return a condition of `SearchVector.filter` as a `OneOf`, also if it is a single value."""
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
    """Id of the row; the address for a web search."""
    text: str
    metadata: Mapping[str, Any]
    score: float
    """Higher is better. For a search by vector, the cosine similarity, in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class CallTool:
    """A call of a function that an engine provides under this name."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments by name."""
    read_only: bool = False
    """True if its author declares that it changes nothing, so that it may be prefetched, and repeated after a crash."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a collection. The result of a search stays valid while the version is the same."""

    identity: str
    """Identity of the collection. It changes when the collection is created again, or its counter restarts."""
    counter: int
    """A number that grows with every change, by whichever process, connection or program."""


class Stored(Protocol):
    """A result of a search or a look-up: a `Hit` or a `Chunk`."""

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

    The prompt of a `Generate` is complete, whatever its text: users may write the character of `UNKNOWN`, too. In the
    prompt of a `Warmup`, the first one ends the known text; one that a user wrote only makes the warm-up shorter.
    """

    carried: ClassVar[bool] = False
    """True if it is a request of the user's own client, which an engine forwards unchanged."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: str = ""
    """JSON text of the tools for the model's chat template, as OpenAI describes them."""

    def flat(self) -> str:
        """Return the text of all parts, for estimates and for engines without a chat template."""
        tools = f"tools: {self.tools}\n" if self.tools else ""
        return self.text or tools + "\n".join(f"{m.role}: {m.content}" for m in self.messages) + "\nassistant:"

    def known_prefix(self) -> str:
        """Return the known text of a `Warmup`'s prompt: `flat()` up to the first placeholder."""
        return self.flat().split(UNKNOWN, 1)[0]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of a decoding. The defaults are greedy, so that equal prompts give equal answers."""

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
    """A request to prefill the known part of a prompt, so that it is cached for the complete prompt."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Warmed:
    tokens: int
    cached_tokens: int = 0
    """Number of them that were in the prefix cache before, as far as the engine reports it."""


class AnswerForm(Enum):
    """A way in which an answer is sent."""

    WHOLE = "whole"
    """In one response."""
    STREAMED = "streamed"
    """In pieces, as it is written."""
    UNKNOWN = "unknown"
    """One of the two, decided by the original when it sends the request."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Generate:
    prompt: Prompt
    sampling: Sampling = Sampling()
    form: AnswerForm | None = field(default=None, compare=False)
    """The form for which the original sends exactly this request: for the other form it sends another one. None if one
    request serves both forms."""

    def with_unknown_form(self) -> Generate:
        """Return the request of an original that may ask for the other form, too."""
        return self if self.form is None else replace(self, form=AnswerForm.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Generation:
    text: str
    finish_reason: str = "stop"
    """`stop` or `length`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens in the prefix cache. 0 may also mean "not known", unless the engine has the attribute
    `tells_cached = True`."""
    drafted: int = field(default=0, compare=False)
    """Number of tokens that the engine drafted and the model verified."""
    accepted: int = field(default=0, compare=False)
    """Number of drafted tokens that the model accepted: they are part of the text."""
    stop_sequence: str = field(default="", compare=False)
    """The text of `Sampling.stop` at which the generation ended; empty if it ended otherwise or the engine does not
    report it."""


@dataclass(frozen=True, slots=True)
class Request:
    """A unit of work of a primitive, for an engine."""

    id: str
    """Unique within the process."""
    kind: PrimitiveKind
    payload: Any
    """See `payloads`."""
    query: str = ""
    tenant: str = ""
    priority: int = 0
    """Admission sequence number of the engine scheduler, lower is more urgent; later by a lag in a gang."""
    stream: bool = False
    """True if the pieces are read. Without a reader, an engine may send only the first piece, and the end. A reader
    that comes later is announced: see `engines.base.announce_reader`."""
    background: bool = False
    """True if it must not delay other requests on the replica (a warm-up during deeper decodings)."""
    keep_remote: bool = False
    """True if only engines read its value: a shared pool may leave a large value where it was computed."""
    depth: int = 0
    """Longest distance of its primitive to the output of its query, when it was admitted."""
    objective: str = "latency"
    """`latency`, `throughput` or `background`."""
    app: str = ""
    drafts: tuple[str, ...] = ()
    """Texts that the answer may repeat, likeliest first. They never affect the result."""
    late: bool = False
    """True if a reader of its pieces may come later, although `stream` is False."""
    unread: bool = False
    """True if it is streamed for its first piece only: the other pieces may arrive as one."""

    def admitted(self, priority: int, depth: int, objective: str) -> Request:
        """Return the request as it is sent to its engine. (`dataclasses.replace` takes five times as long.)"""
        return Request(
            self.id,
            self.kind,
            self.payload,
            self.query,
            self.tenant,
            priority,
            self.stream,
            self.background,
            self.keep_remote,
            depth,
            objective,
            self.app,
            self.drafts,
            self.late,
            self.unread,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a streamed value, in order. The first piece ends the prefilling."""

    request_id: str
    text: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The value of a request; exactly one `Done` or `Failed` ends it."""

    request_id: str
    value: Any
    stats: Mapping[str, float] = field(default_factory=dict)
    version: Version | None = None
    """SEARCHING: version of the collection, read in the search's own snapshot; None if the store has none."""
    cuts: tuple[int, ...] = ()
    """Lengths, in characters, of the pieces in which the text of a generation without a reader would have arrived, for
    a reader that comes later. Empty if the engine does not know them."""


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    error: EngineError


Result = Piece | Done | Failed


def advice(error: BaseException) -> str:
    """Return a hint for an error that was raised while a payload was read.

    Engines give it with their error, so that the user sees which of the values sent is to be mended.
    """
    if isinstance(error, UnicodeError):
        return "clean the text: text.encode('utf-8', 'replace').decode() leaves no half of a character"
    return "look at the values that are sent: texts are str, vectors are flat sequences of numbers"


def lone_surrogate(text: str) -> str:
    """Describe the first lone surrogate in a text, which broken decoding leaves; return "" if there is none."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is a lone surrogate, U+{ord(text[error.start]):04X}."
    return ""
