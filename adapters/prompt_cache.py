"""`accelerate(app, prompt_cache=True)`: what providers need in a request to find the beginning of its prompt cached.

OpenAI gets a `prompt_cache_key`, so that requests with one beginning reach one machine. Anthropic and Bedrock get cache
markers on the beginning that is likely to come again. Both are set where the provider method of the user's model is
called: the framework's events, and the request keys of prefetched calls, are those of the unchanged call.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import takewhile
from typing import Any

from teola_plugin.adapters.planned_queries import log_fallback

CACHE_CONTROL = {"type": "ephemeral"}
"""Anthropic's marker. This very object tells a marker of ours from one of the user's."""
CACHE_POINT = {"cachePoint": {"type": "default"}}
"""Bedrock's marker in its Converse API: a block of its own. This very object tells it from one of the user's."""
MAX_MARKERS = 4
"""Markers that Anthropic and Bedrock take in one request."""
MAX_PREFIXES = 4096
"""Beginnings of prompts that are remembered."""
MAX_INSTRUCTIONS = 64
"""Instructions of one model with one set of tools that are remembered."""
KEY_CHARACTERS = 1024
"""Characters of the instructions that decide `prompt_cache_key`, about as many as OpenAI routes a request by."""
_SHOWN_CHARACTERS = 30


class CacheForm(Enum):
    """The form in which a provider is told what to cache."""

    KEY = "prompt_cache_key"
    MARKER = "cache_control"
    POINT = "cachePoint"


_FORMS: tuple[tuple[str, str, CacheForm], ...] = (
    ("langchain_openai", "BaseChatOpenAI", CacheForm.KEY),
    ("langchain_anthropic", "ChatAnthropic", CacheForm.MARKER),
    ("langchain_aws", "ChatBedrockConverse", CacheForm.POINT),
    ("langchain_aws", "ChatBedrock", CacheForm.MARKER),
    ("langchain_aws", "ChatAnthropicBedrock", CacheForm.MARKER),
    ("llama_index.llms.openai", "OpenAI", CacheForm.KEY),
    ("llama_index.llms.azure_openai", "OpenAI", CacheForm.KEY),
)
"""The package of an integration, a class in it or below it, and the form of its provider."""
_INTEGRATIONS = ("langchain_", "llama_index.")


@lru_cache(maxsize=256)
def cache_form(cls: Any) -> CacheForm | None:
    """Return the form for models of a class; None for a provider that takes none, or is not known to.

    Classes that a user derives count as the class above them, those of other integrations do not: their servers may
    refuse what they do not know.
    """
    module = next((one.__module__ for one in cls.__mro__ if one.__module__.startswith(_INTEGRATIONS)), "")
    names = {one.__name__ for one in cls.__mro__}
    forms = (form for package, name, form in _FORMS if f"{module}.".startswith(f"{package}.") and name in names)
    return next(forms, None)


class PromptCache:
    """The cache keys and markers of one accelerated app. Used from any thread."""

    def __init__(self, app: str = "") -> None:
        self.app = app
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[str, bool] = OrderedDict()
        """Digests of beginnings of earlier requests, the latest last; True for those of whole prompts."""
        self._instructions: dict[tuple[str, str], Instructions] = {}
        """By the class of the model and a digest of its tools."""

    def wrap(self, target: Any, original: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return a provider method of a model with keys and markers; None where its provider takes none.

        It is called as the function of the original's class is: with the object first.
        """
        cls: Any = type(target)
        form = cache_form(cls)
        if form is None:
            return None

        def method(target: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                args, kwargs = self._arguments(form, target, args, kwargs)
            except Exception as error:
                log_fallback(error, target, "its prompt cache")
            return original(target, *args, **kwargs)

        return method

    def _arguments(
        self, form: CacheForm, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a provider call with a key or markers."""
        name = "messages" if "messages" in kwargs else "prompt"
        prompt, tools = args[0] if args else kwargs.get(name), kwargs.get("tools") or ()
        messages = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else []
        if _is_cached_by_user(form, target, kwargs) or _has_our_marker(messages):
            return args, kwargs
        system = list(takewhile(_is_instruction, messages))
        text, digest_of_tools = "\n".join(_text(message) for message in system), _digest("", tools)
        with self._lock:
            key = type(target).__name__, digest_of_tools
            instructions = self._instructions.setdefault(key, Instructions())
            is_stable = instructions.note(text)
        if form is CacheForm.KEY:
            key_text = json.dumps([self.app, digest_of_tools, text[:KEY_CHARACTERS]])
            cache_key = f"teola-{hashlib.sha256(key_text.encode()).hexdigest()[:24]}"
            return args, {**kwargs, CacheForm.KEY.value: cache_key}
        free = MAX_MARKERS - _count_markers([*(_content(message) for message in messages), *tools])
        marks_tools = bool(tools) and not (system and is_stable) and free > 0
        positions = [len(system) - 1] if system and is_stable else []
        positions += self._stable_positions(messages, f"{key[0]} {digest_of_tools}", len(system))
        marked = _marked_messages(form, messages, positions, len(system), free - marks_tools)
        if marks_tools:
            kwargs = {**kwargs, "tools": _marked_tools(form, tools)}
        if not args:
            return args, {**kwargs, name: marked}
        return (marked, *args[1:]), kwargs

    def _stable_positions(self, messages: list[Any], start: str, system_count: int) -> list[int]:
        """Return the indexes of messages behind the instructions at which a stable beginning of the prompt ends.

        One is the longest beginning that an earlier request had, too. If that was a whole prompt, this is a
        conversation that goes on, and the end of this prompt is another.
        """
        digests, digest = list[str](), start
        for message in messages:
            digest = _digest(digest, [_role(message), _content(message), getattr(message, "tool_calls", None)])
            digests.append(digest)
        with self._lock:
            longest = max((index for index, one in enumerate(digests) if one in self._prefixes), default=-1)
            was_whole = longest >= 0 and self._prefixes[digests[longest]]
            for index, one in enumerate(digests):
                self._prefixes[one] = index == len(digests) - 1 or self._prefixes.get(one, False)
                self._prefixes.move_to_end(one)
            while len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.popitem(last=False)
        if longest < system_count:
            return []
        goes_on = was_whole and longest < len(messages) - 1
        return [len(messages) - 1, longest] if goes_on else [longest]

    def describe(self) -> Iterator[str]:
        """Yield a line for each model that was called, and for what breaks the beginning of its prompts."""
        with self._lock:
            noted = dict(self._instructions)
        if not noted:
            yield "No model with a prompt cache was called so far."
        for (name, _), instructions in noted.items():
            yield f"{name}: calls: {instructions.request_count}, different instructions: {instructions.different_count}"
            if instructions.different_count > 1:
                common_end = instructions.common[-_SHOWN_CHARACTERS:]
                where = f"behind {common_end!r}" if common_end else "at their beginning"
                yield f"    they differ {where}: put what changes into the message of the user, or at their end"


@dataclass(slots=True)
class Instructions:
    """The instructions (system messages at the beginning) of the requests of one model with one set of tools."""

    request_count: int = 0
    different_count: int = 0
    """At most `MAX_INSTRUCTIONS` are told apart."""
    common: str = ""
    """The beginning that all of them share."""
    _digests: set[str] = field(default_factory=set)

    def note(self, text: str) -> bool:
        """Note the instructions of a request. Return True if they are likely to come again.

        That is so for the first ones, and for those that came before. Where they change, others are not.
        """
        digest = _digest("", text)
        is_known, is_first = digest in self._digests, not self.request_count
        self.request_count += 1
        self.common = text if is_first else _common_beginning(self.common, text)
        if not is_known and len(self._digests) < MAX_INSTRUCTIONS:
            self._digests.add(digest)
            self.different_count += 1
        return is_known or is_first


def _common_beginning(text: str, other: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def prompt_cache_section(cache: PromptCache | None) -> str:
    """Return the section of `explain()`; empty without `prompt_cache=True`."""
    title = "Prompt cache (prompt_cache=True)"
    return "" if cache is None else "\n".join(["", "", title, "-" * len(title), *cache.describe()])


# ------------------------------------------------------------ messages


def _digest(start: str, value: Any) -> str:
    return hashlib.sha256((start + json.dumps(value, default=str)).encode()).hexdigest()


def _role(message: Any) -> str:
    role = getattr(message, "type", None) or getattr(message, "role", "")
    return str(getattr(role, "value", role))


def _content(message: Any) -> Any:
    return getattr(message, "content", None)


def _is_instruction(message: Any) -> bool:
    return _role(message) in ("system", "developer")


def _text(message: Any) -> str:
    content = _content(message)
    return content if isinstance(content, str) else json.dumps(content, default=str)


# ------------------------------------------------------------ markers


def _is_cached_by_user(form: CacheForm, target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the user has set the key, or has the provider's integration set markers."""
    settings = [getattr(target, name, None) for name in ("model_kwargs", "extra_body", "additional_kwargs")]
    name = CacheForm.KEY.value if form is CacheForm.KEY else CacheForm.MARKER.value
    return any(isinstance(one, Mapping) and name in one for one in (kwargs, kwargs.get("extra_body"), *settings))


def _blocks(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the dictionaries in contents of messages, and tools."""
    for one in value if isinstance(value, list | tuple) else ():
        if isinstance(one, Mapping):
            yield one
        yield from _blocks(one.get("content") if isinstance(one, Mapping) else one)


def _count_markers(contents: list[Any]) -> int:
    names = (CacheForm.MARKER.value, CacheForm.POINT.value)
    return sum(any(name in block for name in names) for block in _blocks(contents))


def _has_our_marker(messages: list[Any]) -> bool:
    """Return True if a provider method of the same model was called with these markers, and now calls another one."""
    blocks = _blocks([_content(message) for message in messages])
    return any(block is CACHE_POINT or block.get(CacheForm.MARKER.value) is CACHE_CONTROL for block in blocks)


def _marked_messages(
    form: CacheForm, messages: list[Any], positions: list[int], system_count: int, free: int
) -> list[Any]:
    """Return the messages with a marker at each position, as far as markers are free.

    A message that takes none (an answer of the model, an empty one) leaves it to one before it.
    """
    marked = list(messages)
    for position in dict.fromkeys(positions):
        first = system_count if position >= system_count else 0
        for index in range(position, first - 1, -1) if free > 0 else ():
            message = _marked_message(form, marked[index])
            if message is not None:
                marked[index], free = message, free - 1
                break
    return marked


_MARKED_ROLES = {
    CacheForm.MARKER: ("system", "human", "tool"),
    CacheForm.POINT: ("system", "human"),  # in the result of a tool Bedrock takes no marker
}
_MARKED_BLOCKS = ("text", "image", "image_url", "document", "file")


def _marked_message(form: CacheForm, message: Any) -> Any | None:
    """Return a copy of a message that ends with a marker; None for one that takes none, or has one."""
    content = _content(message)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    last = blocks[-1] if blocks else None
    if _role(message) not in _MARKED_ROLES[form] or not isinstance(last, dict) or last.get("text", "-").strip() == "":
        return None
    if last.get("type") not in _MARKED_BLOCKS or form.value in last:
        return None
    if form is CacheForm.POINT:
        blocks.append(CACHE_POINT)
    else:
        blocks[-1] = {**last, CacheForm.MARKER.value: CACHE_CONTROL}
    return message.model_copy(update={"content": blocks})


def _marked_tools(form: CacheForm, tools: Sequence[Any]) -> list[Any]:
    """Return the tools with a marker behind the last one, unless it has one or is left out of the prompt."""
    last = tools[-1]
    if not isinstance(last, dict) or form.value in last or last.get("defer_loading"):
        return list(tools)
    return [*tools, CACHE_POINT] if form is CacheForm.POINT else [*tools[:-1], {**last, form.value: CACHE_CONTROL}]
