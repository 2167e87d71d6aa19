"""Requests for chats, completions, embeddings and reranking, as clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from teola_plugin.requests.payloads import lone_surrogate
from teola_plugin.server.errors import bad_request, invalid

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
INT64 = 2**63
MAX_DEPTH = 128
"""Arrays and objects inside one another that a request may have; engines' parsers of schemas take fewer."""


class ClientJson(BaseModel):
    """JSON that a client sends. A null counts as an absent name, except within JSON that is the client's own data."""

    OWN_DATA: ClassVar[frozenset[str]] = frozenset({"metadata"})
    """Fields whose content is the client's own data, where null is a value."""

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, data: Any) -> Any:
        """Drop names whose value is null, outside the client's own data, before pydantic validates the fields.

        Raise `JsonFault` for data that engines and JSON cannot carry.
        """
        check_json(data)
        if not isinstance(data, dict):
            return data
        names = cls.model_fields.keys() - cls.OWN_DATA
        return {
            name: without_nulls(value) if name in names else value for name, value in data.items() if value is not None
        }


OWN_DATA_WITHIN = frozenset({"parameters", "schema", "arguments", "metadata", "input_schema", "input"})
"""Names within fields of the protocol that hold JSON schemas and arguments of calls: null is a value there."""


def without_nulls(value: Any) -> Any:
    """Return the JSON `value` without the names of its objects whose value is null, except within the client's data."""
    if isinstance(value, dict):
        return {
            name: inner if name in OWN_DATA_WITHIN else without_nulls(inner)
            for name, inner in value.items()
            if inner is not None
        }
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class JsonFault(ValueError):
    """Data that engines and JSON cannot carry, in a field of a request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def check_json(data: Any) -> None:
    """Raise `JsonFault` for data that engines and JSON cannot carry.

    These are halves of characters, numbers that are not finite, and nesting deeper than `MAX_DEPTH`. The error names
    the field.
    """
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        text.encode()
        if text.count("[") + text.count("{") <= MAX_DEPTH:
            return
    except (TypeError, ValueError, RecursionError):  # the search below finds the fault and its field
        pass
    for field, reason in _json_faults(data):
        raise JsonFault(field, reason)


def _json_faults(data: Any) -> Iterator[tuple[str, str]]:
    """Yield the field and the reason of each fault that `check_json` refuses."""
    pending: list[tuple[str, Any, int]] = [("", data, 0)]
    while pending:
        field, value, depth = pending.pop()
        if isinstance(value, str) and (fault := lone_surrogate(value)):
            yield field, fault.rstrip(".")
        elif isinstance(value, float) and not abs(value) < float("inf"):
            yield field, f"{value} is no number of JSON"
        elif isinstance(value, dict | list) and depth >= MAX_DEPTH:
            yield field.partition(".")[0], f"it is nested deeper than {MAX_DEPTH} levels"
        elif isinstance(value, dict):
            yield from ((field, fault.rstrip(".")) for name in value if (fault := lone_surrogate(name)))
            pending += [(f"{field}.{name}".lstrip("."), inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [(f"{field}.{at}".lstrip("."), inner, depth + 1) for at, inner in enumerate(value)]


def parse_json(text: str | bytes, field: str, hint: str) -> Any:
    """Return the data of JSON text that came in `field` of a request, or as its body where `field` is empty.

    Raise `HttpError` that names the field.
    """
    try:
        data = json.loads(text)
        check_json(data)
    except JsonFault as error:
        field = ".".join(part for part in (field, error.field) if part)
        reason = str(error)
    except RecursionError:
        reason = f"it is nested deeper than {MAX_DEPTH} levels"
    except ValueError as error:
        reason = f"it is not JSON: {str(error)[:200]}".rstrip(".")
    else:
        return data
    raise bad_request(f"{field or 'the body'}: {reason}.", hint, param=field or None, code="invalid_value")


class Body(ClientJson):
    """A request of the protocol. Parameters that nobody here knows are kept: a carrying engine passes them on."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: str = Field(min_length=1, max_length=256)
    """The name of an engine or an app."""
    user: str | None = None
    """The client's name for its end user."""
    metadata: dict[str, Any] | None = None
    """For an app: `inputs` (JSON), `thread_id`, `resume` and `config`."""

    def sent_fields(self) -> dict[str, Any]:
        """Return what the client has sent, as JSON-ready data."""
        return self.model_dump(mode="json", exclude_unset=True)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class Generating(Body):
    """The parameters that chats and completions share."""

    max_tokens: int | None = Field(None, ge=1, le=1 << 24)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    n: int | None = Field(None, ge=1, le=16)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Generating):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 24)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def characters(self) -> int:
        """About how many characters its messages have; each part that is no text counts as a fixed number."""
        return sum(_length(message.content) for message in self.messages)


def _length(content: str | list[dict[str, Any]] | None) -> int:
    """Return about how many characters a message's content has.

    A part without text, such as an image, counts as 256. The number only bounds the queue.
    """
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(text) if isinstance(text := part.get("text"), str) else 256 for part in content)


class CompletionRequest(Generating):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=16)
    suffix: str | None = None


HARMLESS = frozenset(
    {
        *("metadata", "model", "user", "stream", "stream_options", "store", "service_tier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "reasoning_effort", "verbosity", "strict"),
    }
)
"""Parameters that change nothing of the answer."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
}
"""Parameters that engines of the pool do not support, and those of their values that change nothing."""


def has_no_effect(name: str, value: Any) -> bool:
    """Return True if a value of a parameter in `UNSUPPORTED` changes no answer. The number 0 is not False.

    Clients often send defaults explicitly; such a request is accepted, and any other value refused. Raise `KeyError`
    for a name that is not in `UNSUPPORTED`.
    """
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in UNSUPPORTED[name]
    )


def to_chat(data: Any, protocol: str = "OpenAI") -> ChatRequest:
    """Return the chat that the JSON `data` is. Raise `HttpError`, which names the protocol, for what is no chat.

    The error (400) names the first field that is wrong. Other protocols are translated into a chat before this.
    """
    try:
        return ChatRequest.model_validate(data)
    except ValidationError as error:
        raise invalid(error.errors()[0], f"see {protocol}'s reference of chats") from None


def further_parameters(body: Body, ignored: frozenset[str], chat_only: frozenset[str]) -> dict[str, Any]:
    """Return the parameters of a request that its protocol does not have, for the model to accept or refuse.

    `ignored` are left out, since they change no answer. Raise `HttpError` for those that only chats have, which this
    protocol spells otherwise.
    """
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in ignored}
    for name in chat_only & extra.keys():
        raise bad_request(f"there is no parameter {name!r}.", "check its name", param=name, code="unknown")
    return extra


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as chats have it."""
    return {"type": "function", "function": dict(function)}


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as messages of chats have it. `arguments`: JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class EmbeddingRequest(Body):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    input_type: Literal["query", "document"] = "document"
    """Some models put one text before questions, and another before documents."""


class Document(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(Body):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
