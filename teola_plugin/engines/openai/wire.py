"""What goes over the wire to an OpenAI-compatible server, and what comes back. Standard library only, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from teola_plugin.engines.openai.envelope import Envelope
from teola_plugin.requests.payloads import UNKNOWN, Generation, Message, Prompt, Sampling
from teola_plugin.requests.results import Piece

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SELDOM = {"stream_interval": 256}
"""To vLLM: tokens in a piece, after the first, which comes at once; a sign of life now and then. Versions that do not
know it leave it alone."""
_OF_STREAMS = ("stream", "stream_options")
_HARD_TO_JOIN = ("tools", "functions", "logprobs", "top_logprobs", "audio", "modalities", "prompt_logprobs")
"""Parameters whose answers have parts that chunks spread in ways of their own."""


@dataclass(frozen=True, slots=True)
class WirePrompt(Prompt):
    """A prompt together with the whole request that a client would send, which is sent as it is."""

    carried: ClassVar[bool] = True

    body: str = ""
    """JSON of the request for `/chat/completions`."""
    exact: bool = False
    """Whether `body` also says how the answer is sent (`stream`): so it is asked for, and so it is given back.

    Otherwise the answer may come as a stream that is put together again, whoever asks for it in either way.
    """
    envelope: Envelope | None = None
    """How the client addresses its server; None for the engine's own way."""

    @classmethod
    def of(cls, body: Mapping[str, Any], *, exact: bool, envelope: Envelope | None = None) -> WirePrompt:
        kept = {key: value for key, value in body.items() if exact or key not in _OF_STREAMS}
        messages = tuple(Message(str(m.get("role", "")), _text(m.get("content"))) for m in body.get("messages", ()))
        return cls(messages=messages, body=json.dumps(kept, ensure_ascii=False), exact=exact, envelope=envelope)

    @property
    def sampling(self) -> Sampling:
        """What is known of how it decodes: enough to tell whether doing it again gives the same."""
        body = json.loads(self.body)
        given = {key: body[key] for key in ("temperature", "top_p", "seed") if body.get(key) is not None}
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 256
        return Sampling(**{"temperature": 1.0, "max_tokens": tokens, **given})


@dataclass(frozen=True, slots=True)
class WireGeneration(Generation):
    response: str = ""
    """JSON of the whole response, as the server sent it or as its chunks add up to."""


@dataclass(frozen=True, slots=True)
class WirePiece(Piece):
    chunk: str = ""
    """JSON of the chunk."""


def _text(content: Any) -> str:
    """The text of a message's content, which may come in blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


# ------------------------------------------------------------ requests


def path_and_body(prompt: Prompt, sampling: Sampling, model: str) -> tuple[str, dict[str, Any]]:
    """Where to send a generation, and the JSON to send."""
    if isinstance(prompt, WirePrompt):
        return "chat/completions", json.loads(prompt.body)
    body = {"model": model, **_decoding(sampling)}
    if prompt.messages:
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        return "chat/completions", {**body, **_tools(prompt), "messages": messages}
    return "completions", {**body, "prompt": prompt.text}


def _tools(prompt: Prompt) -> dict[str, Any]:
    """Told to the model; what it writes comes back as text, for whoever asked to read."""
    return {"tools": json.loads(prompt.tools), "tool_choice": "none"} if prompt.tools else {}


def _decoding(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from the protocol's defaults: strict servers refuse parameters that they do not know."""
    body: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    wanted: dict[str, tuple[Any, Any]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "seed": (sampling.seed, None),
    }
    wanted |= {"stop": (list(sampling.stop), []), "ignore_eos": (sampling.ignore_eos, False)}
    body |= {key: value for key, (value, nothing) in wanted.items() if value != nothing}
    if sampling.json_schema:
        schema = {"name": "answer", "schema": json.loads(sampling.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def prefix(prompt: Prompt, model: str) -> tuple[str, dict[str, Any]]:
    """Where to send what precedes the first unknown slot, and the JSON to send.

    Chat messages are sent up to that slot, as if they ended there: the few tokens of that end are of no use to the
    whole prompt, all before them are its own.
    """
    body = _told_of(prompt, model)
    if "prompt" in body:
        return "completions", {**body, "prompt": _known(body["prompt"])}
    return "chat/completions", {**body, "messages": _known(body["messages"])}


def known_part(prompt: Prompt) -> str:
    """What decides the ids up to the first unknown slot; where one of these begins with another, so does its prompt."""
    body = _told_of(prompt, "")
    said = body.pop("messages", None) or body.pop("prompt")
    return json.dumps([{**body, "model": ""}, said], ensure_ascii=False).split(UNKNOWN, 1)[0]


def _told_of(prompt: Prompt, model: str) -> dict[str, Any]:
    """What of a request decides the ids of its prompt."""
    if isinstance(prompt, WirePrompt):
        body = {"model": model, **json.loads(prompt.body)}
        return {key: body[key] for key in ("model", "messages", "tools", "chat_template_kwargs") if key in body}
    if not prompt.messages:
        return {"model": model, "prompt": prompt.text}
    tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
    return {"model": model, **tools, "messages": [{"role": m.role, "content": m.content} for m in prompt.messages]}


def _known(value: Any) -> Any:
    """A value up to its first unknown slot."""
    if isinstance(value, str):
        return value.split(UNKNOWN, 1)[0]
    if isinstance(value, Mapping):
        return {key: _known(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    first = next((at for at, one in enumerate(value) if _unknown(one)), len(value))
    return [_known(one) for one in value[: first + 1]]


def _unknown(value: Any) -> bool:
    return UNKNOWN in json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------ answers


def generation(response: str, *, wire: bool) -> Generation:
    """The value of a whole response. Raises `ValueError` for JSON that is no completion."""
    try:
        data: dict[str, Any] = json.loads(response)
        choice = data["choices"][0]
        message = choice.get("message")
        text = choice["text"] if message is None else _text(message.get("content"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer is no completion: {response[:200]}") from error
    usage = data.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    counts = (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, details.get("cached_tokens") or 0)
    reason = choice.get("finish_reason") or "stop"
    return WireGeneration(text, reason, *counts, response=response) if wire else Generation(text, reason, *counts)


def joinable(body: Mapping[str, Any]) -> bool:
    """Whether chunks add up to the very response that would come in one."""
    return not any(body.get(key) for key in _HARD_TO_JOIN) and body.get("n") in (None, 1)


def chunk(line: str) -> str:
    """What a line of a stream carries; empty for its end and for lines between."""
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    return "" if data == "[DONE]" else data


class Chunks:
    """Gathers the chunks of a stream."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def text(self, chunk: str) -> str:
        """The text that a chunk adds."""
        choices = json.loads(chunk).get("choices")
        if not choices:
            return ""
        return _text((choices[0].get("delta") or {}).get("content")) or choices[0].get("text") or ""

    def add(self, chunk: str) -> None:
        """Raises `ValueError` for an error that the server sends in place of a chunk."""
        data = json.loads(chunk)
        if "choices" not in data:
            raise ValueError(f"the stream broke off: {_told(data) or chunk[:200]}")
        self.all.append(data)

    def response(self, shape: Mapping[str, Any] | None = None) -> str:
        """JSON of the response that would have come without streaming.

        `shape` is a whole response of the same server: fields that are null there and missing here are filled in.
        """
        told = {key: value for data in self.all for key, value in data.items() if value is not None}
        choices = [choice for data in self.all for choice in data["choices"]]
        deltas = [choice["delta"] for choice in choices if choice.get("delta")]
        reason = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
        usage = next((data["usage"] for data in reversed(self.all) if data.get("usage")), None)
        end: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if deltas:
            end["message"] = _message(deltas)
        else:
            end["text"] = "".join(choice.get("text") or "" for choice in choices)
        kept = {key: value for key, value in told.items() if key not in ("choices", "usage", "object")}
        kind = "chat.completion" if deltas else "text_completion"
        whole = {**kept, "object": kind, "choices": [end], "usage": usage}
        return json.dumps(_completed(whole, shape), ensure_ascii=False)


def _message(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in deltas:
        for key, value in delta.items():
            adds = isinstance(value, str) and isinstance(joined.get(key), str) and key != "role"
            joined[key] = joined[key] + value if adds else value if value is not None else joined.get(key)
    return joined


def _completed(value: Any, shape: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(shape, Mapping):
        filled = {key: _completed(inner, shape.get(key)) for key, inner in value.items()}
        return filled | {key: None for key, inner in shape.items() if inner is None and key not in value}
    if isinstance(value, list) and isinstance(shape, list) and len(shape) == 1:
        return [_completed(inner, shape[0]) for inner in value]
    return value


def same_fields(one: Any, other: Any) -> bool:
    """Whether two responses have fields of the same names."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_fields(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_fields, one, other))
    return True


def chunks_of(response: str) -> list[str]:
    """A stream that adds up to a response that came in one: its text in a single chunk, then its end."""
    data = json.loads(response)
    choice = data["choices"][0]
    common = {key: data[key] for key in ("id", "created", "model", "system_fingerprint", "service_tier") if key in data}
    common["object"] = "chat.completion.chunk"
    told = {key: value for key, value in choice["message"].items() if value is not None}
    end = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason"), "logprobs": None}
    chunks = [{"index": 0, "delta": told, "finish_reason": None, "logprobs": choice.get("logprobs")}, end]
    found = [json.dumps({**common, "choices": [one]}) for one in chunks]
    return [*found, json.dumps({**common, "choices": [], "usage": data.get("usage")})]


def told_by(content: str) -> str:
    """The message in a server's error, as far as it is spelled in a known way."""
    try:
        return _told(json.loads(content))
    except ValueError:
        return content.strip()[:300]


def _told(data: Any) -> str:
    inner = data.get("error", data) if isinstance(data, Mapping) else data
    if isinstance(inner, Mapping):
        inner = inner.get("message") or inner.get("detail") or ""
    return str(inner)
