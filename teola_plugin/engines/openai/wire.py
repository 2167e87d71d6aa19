"""Requests to an OpenAI-compatible server and its replies, as JSON. Standard library only, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from teola_plugin.engines.openai.envelope import Envelope
from teola_plugin.requests.payloads import UNKNOWN, Generation, Message, Piece, Prompt, Sampling

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
MERGE_UNREAD = {"stream_interval": 256}
"""Tells vLLM to send 256 tokens in a piece after the first one. Versions that do not know the field ignore it."""
_STREAM_FIELDS = ("stream", "stream_options")
_HARD_TO_JOIN = ("tools", "functions", "logprobs", "top_logprobs", "audio", "modalities", "prompt_logprobs")
"""Parameters whose answers have parts that chunks spread in ways of their own."""


Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class WirePrompt(Prompt):
    """A prompt together with the whole request that a client would send, which is sent as it is."""

    carried: ClassVar[bool] = True

    body: str = ""
    """JSON of the request for `/chat/completions`."""
    exact: bool = False
    """True if `body` also decides how the answer is sent (`stream`), in which form it is then returned.

    Otherwise the answer may come as a stream, which is joined if the client wants a complete answer.
    """
    envelope: Envelope | None = None
    """The address and headers of the client; None for those of the engine."""

    @classmethod
    def of(cls, body: Mapping[str, Any], *, exact: bool, envelope: Envelope | None = None) -> WirePrompt:
        """Return the prompt for a request body that a client wrote; stream settings are dropped unless `exact`."""
        fields = {key: value for key, value in body.items() if exact or key not in _STREAM_FIELDS}
        messages = tuple(
            Message(str(m.get("role", "")), content_text(m.get("content"))) for m in body.get("messages", ())
        )
        return cls(messages=messages, body=json.dumps(fields, ensure_ascii=False), exact=exact, envelope=envelope)

    @property
    def sampling(self) -> Sampling:
        """The known part of its sampling parameters: enough to tell if repeating it gives the same answer.

        A body without a temperature counts as 1.0, and one without a limit of tokens as 256.
        """
        body = json.loads(self.body)
        parameters = {key: body[key] for key in ("temperature", "top_p", "seed") if body.get(key) is not None}
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 256
        return Sampling(**{"temperature": 1.0, "max_tokens": tokens, **parameters})


@dataclass(frozen=True, slots=True)
class WireGeneration(Generation):
    response: str = ""
    """JSON of the whole response, as the server sent it or as its chunks add up to."""
    headers: Headers = field(default=(), repr=False, compare=False)
    """The headers of the HTTP response that it came with."""


@dataclass(frozen=True, slots=True)
class WirePiece(Piece):
    chunk: str = ""
    """JSON of the chunk."""
    headers: Headers = field(default=(), repr=False, compare=False)
    """The headers of the HTTP response, with its first chunk; none with the others."""


def content_text(content: Any) -> str:
    """Return the text of a message's content, which may come in blocks; empty for content of any other kind."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


# ------------------------------------------------------------ requests


def path_and_body(prompt: Prompt, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body for a generation."""
    if isinstance(prompt, WirePrompt):
        return "chat/completions", json.loads(prompt.body)
    body = {"model": model, **_sampling_fields(sampling)}
    if prompt.messages:
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        return "chat/completions", {**body, **_tools(prompt), "messages": messages}
    return "completions", {**body, "prompt": prompt.text}


def _tools(prompt: Prompt) -> dict[str, Any]:
    """Return the tools for the model. The calls that it writes come back as text, which the caller reads."""
    return {"tools": json.loads(prompt.tools), "tool_choice": "none"} if prompt.tools else {}


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that differ from the protocol's defaults: strict servers refuse unknown ones."""
    body: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    parameters: dict[str, tuple[Any, Any]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "seed": (sampling.seed, None),
    }
    parameters |= {"stop": (list(sampling.stop), []), "ignore_eos": (sampling.ignore_eos, False)}
    body |= {key: value for key, (value, default) in parameters.items() if value != default}
    if sampling.json_schema:
        schema = {"name": "answer", "schema": json.loads(sampling.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def prefix(prompt: Prompt, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body for the text before the first placeholder.

    Chat messages are sent up to the placeholder, as if they ended there. The few tokens of that end are useless for the
    complete prompt, but all tokens before them are its own.
    """
    body = _prompt_fields(prompt, model)
    if "prompt" in body:
        return "completions", {**body, "prompt": _up_to_unknown(body["prompt"])}
    return "chat/completions", {**body, "messages": _up_to_unknown(body["messages"])}


def known_part(prompt: Prompt) -> str:
    """Return a text that decides the token ids before the first placeholder: its prefixes are prompt prefixes."""
    body = _prompt_fields(prompt, "")
    prompt_value = body.pop("messages", None) or body.pop("prompt")
    return json.dumps([{**body, "model": ""}, prompt_value], ensure_ascii=False).split(UNKNOWN, 1)[0]


def _prompt_fields(prompt: Prompt, model: str) -> dict[str, Any]:
    """Return the fields of a request that decide the token ids of its prompt."""
    if isinstance(prompt, WirePrompt):
        body = {"model": model, **json.loads(prompt.body)}
        return {key: body[key] for key in ("model", "messages", "tools", "chat_template_kwargs") if key in body}
    if not prompt.messages:
        return {"model": model, "prompt": prompt.text}
    tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
    return {"model": model, **tools, "messages": [{"role": m.role, "content": m.content} for m in prompt.messages]}


def _up_to_unknown(value: Any) -> Any:
    """Return a value up to its first unknown slot."""
    if isinstance(value, str):
        return value.split(UNKNOWN, 1)[0]
    if isinstance(value, Mapping):
        return {key: _up_to_unknown(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    first = next((at for at, one in enumerate(value) if _has_unknown(one)), len(value))
    return [_up_to_unknown(one) for one in value[: first + 1]]


def _has_unknown(value: Any) -> bool:
    return UNKNOWN in json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------ replies


class MalformedReply(ValueError):
    """A reply of a server that is not JSON, or not the JSON of a completion. The message names the field."""


_MAX_DEPTH = 100
"""Levels of nesting that a reply may have: Python's own JSON reader and writer fail at some deeper one."""
_MAX_COUNT = 1 << 53
"""Counts are below it, so that sums of them stay exact as floats."""


def parse_json(text: str, *, standard: bool = False) -> Any:
    """Return the value of JSON text. Raise MalformedReply for anything else, and for more than _MAX_DEPTH levels.

    With `standard`, NaN and numbers that overflow a float are refused, which Python's reader accepts: they cannot be
    written again as JSON.
    """
    options: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if standard else {}
    try:
        value = json.loads(text, **options)
    except MalformedReply:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedReply(f"it is not JSON ({error})") from error
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_too_deep(value):
        raise MalformedReply(f"it is nested more than {_MAX_DEPTH} levels deep")
    return value


def _refuse_constant(name: str) -> None:
    raise MalformedReply(f"it is not JSON: it holds {name} as a number")


def _finite(digits: str) -> float:
    """Return the number for its digits. Raise `MalformedReply` if it overflows a float."""
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise MalformedReply(f"the number {digits[:40]} is too large")
    return number


def _is_too_deep(value: Any) -> bool:
    """Return True if a parsed value is nested more than `_MAX_DEPTH` levels deep; it does not recurse."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def parse_object(text: str, *, standard: bool = False) -> dict[str, Any]:
    """Return a JSON object. Raise MalformedReply for anything else."""
    value = parse_json(text, standard=standard)
    if not isinstance(value, dict):
        raise MalformedReply(f"it is {_json_type(value)} instead of an object")
    return value


class _Count:
    """The shape of a number of tokens or of an index."""


Shape = type | dict[str, Any] | list[Any] | tuple[Any, ...]
"""What a value of a reply must be: `str` a text, `_Count` a count, a dict an object with fields of these shapes, a list
with one shape a list of such, a tuple any of its shapes. Null and missing fields always fit, as clients accept them."""
_FUNCTION: Shape = {"name": str, "arguments": str}
_TOOL_CALL: Shape = {"index": _Count, "id": str, "type": str, "function": _FUNCTION}
_MESSAGE: Shape = {"role": str, "content": (str, [(str, {"text": str})]), "tool_calls": [_TOOL_CALL]}
_CHOICE: Shape = {"index": _Count, "message": _MESSAGE, "delta": _MESSAGE, "text": str, "finish_reason": str}
_USAGE: Shape = {
    "prompt_tokens": _Count,
    "completion_tokens": _Count,
    "total_tokens": _Count,
    "prompt_tokens_details": {"cached_tokens": _Count},
}
_COMPLETION: Shape = {"choices": [_CHOICE], "usage": _USAGE}
_SHAPE_NAMES = {str: "a text", _Count: "a count", dict: "an object", list: "a list"}
_TYPE_NAMES = {bool: "a boolean", str: "a text", list: "a list", dict: "an object", type(None): "null"}


def _json_type(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "a number")


def _mismatch(value: Any, shape: Shape, field: str) -> str:
    """Return how a value departs from its shape, with the name of the field; empty if it fits."""
    if value is None:
        return ""
    if isinstance(shape, tuple):
        mismatches = [_mismatch(value, one, field) for one in shape]
        deeper = [one for one in mismatches if not one.startswith(f"{field} is ")]
        return "" if "" in mismatches else [*deeper, *mismatches][0]
    if isinstance(shape, dict) and isinstance(value, Mapping):
        prefix = f"{field}." if field else ""
        fields = (_mismatch(value.get(name), inner, prefix + name) for name, inner in shape.items())
        return next(filter(None, fields), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (_item_mismatch(one, shape[0], f"{field}[{i}]") for i, one in enumerate(value))), "")
    if (shape is str and isinstance(value, str)) or (shape is _Count and _is_count(value)):
        return ""
    kind = shape if isinstance(shape, type) else type(shape)
    value_text = f" ({value})"[:40] if shape is _Count and isinstance(value, int | float) else ""
    return f"{field or 'it'} is {_json_type(value)}{value_text} instead of {_SHAPE_NAMES[kind]}"


def _item_mismatch(value: Any, shape: Shape, field: str) -> str:
    return f"{field} is null" if value is None else _mismatch(value, shape, field)


def _is_count(value: Any) -> bool:
    """Return True for a number of tokens or an index: whole, at least 0, and so small that floats hold it exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


def check_completion(data: Mapping[str, Any]) -> None:
    """Raise MalformedReply for a whole reply that is no completion. Null is accepted where clients accept it."""
    check_first_choice(data)
    mismatch = _mismatch(data, _COMPLETION, "")
    if mismatch:
        raise MalformedReply(mismatch)
    for i, choice in enumerate(data["choices"]):
        _check_message(choice, f"choices[{i}]")


def check_first_choice(data: Mapping[str, Any]) -> None:
    """Raise MalformedReply for a whole reply without a first choice that has a message or a text."""
    choices = data.get("choices")
    if not choices and data.get("error"):
        raise MalformedReply(f"it is an error: {_error_text(data)[:300]}")
    if "choices" not in data:
        raise MalformedReply("choices is missing")
    if not isinstance(choices, list):
        raise MalformedReply(f"choices is {_json_type(choices)} instead of a list")
    if not choices:
        raise MalformedReply("choices is an empty list")
    if not isinstance(choices[0], Mapping):
        raise MalformedReply(f"choices[0] is {_json_type(choices[0])} instead of an object")
    message = choices[0].get("message")
    if message is not None and not isinstance(message, Mapping):
        raise MalformedReply(f"choices[0].message is {_json_type(message)} instead of an object")
    if message is None and not isinstance(choices[0].get("text"), str):
        raise MalformedReply("choices[0].message is missing or null")


def _check_message(choice: Mapping[str, Any], field: str) -> None:
    """Raise MalformedReply for a choice without a message or a text, or with a call of a function without a name."""
    message = choice.get("message")
    if message is None and choice.get("text") is None:
        raise MalformedReply(f"{field}.message is missing or null")
    for i, call in enumerate((message or {}).get("tool_calls") or ()):
        if call.get("type") in (None, "function") and not (call.get("function") or {}).get("name"):
            raise MalformedReply(f"{field}.message.tool_calls[{i}].function.name is missing")


def check_chunk(data: Mapping[str, Any]) -> None:
    """Raise MalformedReply for a chunk of a stream that is none, or an error that the server sends in place of one."""
    if data.get("error") or "choices" not in data:
        raise MalformedReply(f"the stream broke off: {_error_text(data)[:300] or 'choices is missing'}")
    mismatch = _mismatch(data, _COMPLETION, "")
    if mismatch:
        raise MalformedReply(mismatch)


def _count(counts: Any, name: str) -> int:
    """Return a count of a usage; 0 where the server does not tell it, or not as a number of tokens."""
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if isinstance(value, int) and _is_count(value) else 0


def prompt_tokens(reply: Mapping[str, Any]) -> int:
    """Return the length of the prompt as the usage of a reply tells it; 0 where it does not."""
    return _count(reply.get("usage"), "prompt_tokens")


def generation(response: str, *, wire: bool, headers: Headers = ()) -> Generation:
    """Return the value of a whole response. Raise MalformedReply for one that is no completion.

    With `wire`, the client that wrote the request reads the response itself: only its first choice must be there.
    """
    data = parse_object(response, standard=not wire)
    if wire:
        check_first_choice(data)
    else:
        check_completion(data)
    choice, usage = data["choices"][0], data.get("usage")
    message = choice.get("message")
    text = content_text(choice.get("text") if message is None else message.get("content"))
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    counts = (_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), _count(details, "cached_tokens"))
    reason = choice.get("finish_reason")
    reason = reason if reason and isinstance(reason, str) else "stop"
    if wire:
        return WireGeneration(text, reason, *counts, response=response, headers=headers)
    return Generation(text, reason, *counts)


_BODY_HEADERS = frozenset({"content-type", "content-length", "content-encoding", "transfer-encoding"})


def whole_headers(headers: Headers) -> Headers:
    """Return the headers of a reply as they are true of JSON in one piece, also if it came as a stream."""
    if _content_type(headers).endswith("json"):
        return headers
    return (*_without_body(headers), ("content-type", "application/json"))


def stream_headers(headers: Headers, *, is_exact: bool) -> Headers:
    """Return the headers of a reply as they are true of an event stream, also if the reply came in one piece.

    Of a stream that is not passed on exactly as it came, the length is unknown.
    """
    if _content_type(headers).endswith("json") or not headers:
        return (*_without_body(headers), ("content-type", "text/event-stream"))
    untrue = {"content-encoding"} if is_exact else {"content-encoding", "content-length"}  # the encoding is undone
    return tuple((name, value) for name, value in headers if name.lower() not in untrue)


def joined_headers(headers: Headers) -> dict[str, str]:
    """Return headers as clients show them: names in lower case, values of one name joined."""
    joined: dict[str, str] = {}
    for name, value in headers:
        name = name.lower()
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _content_type(headers: Headers) -> str:
    return joined_headers(headers).get("content-type", "").partition(";")[0].strip().lower()


def _without_body(headers: Headers) -> Headers:
    return tuple((name, value) for name, value in headers if name.lower() not in _BODY_HEADERS)


def joinable(body: Mapping[str, Any]) -> bool:
    """Return True if the chunks of a stream can be joined to the response that would come in one."""
    return not any(body.get(key) for key in _HARD_TO_JOIN) and body.get("n") in (None, 1)


class Chunks:
    """Gathers the chunks of a stream.

    With `strict`, every chunk must have the shape of the protocol. Without, the client that wrote the request reads the
    chunks itself, and may accept more: what has another shape adds nothing here.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.all: list[dict[str, Any]] = []

    def text(self, chunk: str) -> str:
        """Return the text that a chunk adds. Raise MalformedReply for one that is no JSON object."""
        choices = _objects(parse_object(chunk).get("choices"))
        return _delta_text(choices[0]) if choices else ""

    def add(self, chunk: str) -> None:
        """Keep a chunk. Raise MalformedReply for an error that the server sends in its place, and if strict for another
        that is none."""
        data = parse_object(chunk)
        if self._strict or data.get("error"):
            check_chunk(data)
        self.all.append(data)

    @property
    def has_choices(self) -> bool:
        return any(_objects(data.get("choices")) for data in self.all)

    def response(self, shape: Mapping[str, Any] | None = None) -> str:
        """Return JSON of the response that would have come without streaming.

        `shape` is a whole response of the same server: fields that are null there and missing here are filled in.
        """
        fields = {key: value for data in self.all for key, value in data.items() if value is not None}
        choices = [choice for data in self.all for choice in _objects(data.get("choices"))]
        deltas = [delta for choice in choices for delta in _objects([choice.get("delta")]) if delta]
        reason = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
        usage = next((data["usage"] for data in reversed(self.all) if data.get("usage")), None)
        end: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if deltas:
            end["message"] = _message(deltas)
        else:
            end["text"] = "".join(map(_delta_text, choices))
        common = {key: value for key, value in fields.items() if key not in ("choices", "usage", "object")}
        kind = "chat.completion" if deltas else "text_completion"
        response = {**common, "object": kind, "choices": [end], "usage": usage}
        return json.dumps(_completed(response, shape), ensure_ascii=False)


def _objects(values: Any) -> list[Mapping[str, Any]]:
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list) else []


def _delta_text(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice in a streamed chunk: that of a chat's `delta`, else that of a completion.

    Return an empty text if it has neither.
    """
    delta = choice.get("delta")
    content = content_text(delta.get("content")) if isinstance(delta, Mapping) else ""
    return content or content_text(choice.get("text"))


def _message(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to: texts are appended, other fields replaced."""
    joined: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in deltas:
        for key, value in delta.items():
            adds = isinstance(value, str) and isinstance(joined.get(key), str) and key != "role"
            joined[key] = joined[key] + value if adds else value if value is not None else joined.get(key)
    return joined


def _completed(value: Any, shape: Any) -> Any:
    """Return a response with the fields that are null in `shape` and missing here added as null, at every level."""
    if isinstance(value, Mapping) and isinstance(shape, Mapping):
        filled = {key: _completed(inner, shape.get(key)) for key, inner in value.items()}
        return filled | {key: None for key, inner in shape.items() if inner is None and key not in value}
    if isinstance(value, list) and isinstance(shape, list) and len(shape) == 1:
        return [_completed(inner, shape[0]) for inner in value]
    return value


def same_fields(one: Any, other: Any) -> bool:
    """Return True if two responses have fields with the same names."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_fields(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_fields, one, other))
    return True


def chunks_of(response: str) -> list[str]:
    """Return the chunks of a stream for a complete response: its text in a single chunk, then its end."""
    data = json.loads(response)
    choice = data["choices"][0]
    common = {key: data[key] for key in ("id", "created", "model", "system_fingerprint", "service_tier") if key in data}
    common["object"] = "chat.completion.chunk"
    message = choice.get("message")
    delta = {key: value for key, value in (message or {}).items() if value is not None}
    end = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason"), "logprobs": None}
    chunks = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": choice.get("logprobs")}, end]
    texts = [json.dumps({**common, "choices": [one]}) for one in chunks]
    return [*texts, json.dumps({**common, "choices": [], "usage": data.get("usage")})]


def error_message(content: str) -> str:
    """Return the message in a server's error, or the beginning of the error if its form is unknown.

    That beginning has 300 characters at most.
    """
    try:
        return _error_text(parse_json(content))
    except MalformedReply:
        return content.strip()[:300]


def _error_text(data: Any) -> str:
    """Return the message of a server's error, parsed from JSON in any of the usual forms."""
    inner = data.get("error", data) if isinstance(data, Mapping) else data
    if isinstance(inner, Mapping):
        inner = inner.get("message") or inner.get("detail") or ""
    return str(inner)
