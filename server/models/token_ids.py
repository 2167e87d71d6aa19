"""Inputs that are token ids: which text they are only their encoding tells, and the protocol does not name it.

Ids are of the encoding that tiktoken has for the model's name, as with OpenAI's own models. Clients that do not know a
name take one of their own choice: LangChain's `OpenAIEmbeddings` takes `cl100k_base`. vLLM's server takes all ids for
those of its model's tokenizer, so that such a client gets vectors of other texts. Here it is said which they are, or
they are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import ConfigError, EngineUnavailable, unknown_name
from teola_plugin.server.errors import bad_request

if TYPE_CHECKING:
    from tiktoken import Encoding


class TokenIds:
    """`said`: encodings of tiktoken by model, as the settings have them."""

    def __init__(self, said: Mapping[str, str], models: Iterable[str]) -> None:
        """Raises `ConfigError` for a model that is not there, or an encoding that nobody knows."""
        self._said = dict(said)
        known = sorted(models)
        for model, encoding in self._said.items():
            if model not in known:
                raise _wrong(unknown_name("model", model, known))
            _check(encoding)

    async def texts(self, given: str | Sequence[Any], param: str, names: Sequence[str]) -> list[str]:
        """Of a request: a text, texts, the ids of one, or lists of them. `names`: of the model, as it is asked for, as
        it is configured, as it is. Raises `HttpError`."""
        items = [given] if isinstance(given, str) else list(given)
        if items and isinstance(items[0], int):
            items = [items]
        if not items or any(not one for one in items if not isinstance(one, str)):
            raise bad_request(f"{param} is empty.", "give a text, or a list of texts", param=param)
        if all(isinstance(one, str) for one in items):
            return items
        encoding = await _loaded(self._encoding(param, names))
        return [one if isinstance(one, str) else _text(encoding, one, param) for one in items]

    def _encoding(self, param: str, names: Sequence[str]) -> str:
        for name in names:
            if found := self._said.get(name) or _of_model(name):
                return found
        raise bad_request(
            f"{param} holds tokens instead of text, and nobody has said of which encoding.",
            f"send text, or say it in the pool's file: server: token_ids: {{{names[-1]}: cl100k_base}} (which is what "
            "LangChain's OpenAIEmbeddings sends, unless check_embedding_ctx_length=False)",
            param=param,
            code="unsupported",
        )


def _check(encoding: str) -> None:
    if find_spec("tiktoken") is None:
        raise ConfigError("server.token_ids needs tiktoken, which is not installed.", hint="pip install tiktoken")
    from tiktoken import list_encoding_names

    if encoding not in list_encoding_names():
        raise _wrong(unknown_name("encoding", encoding, list_encoding_names()))


def _wrong(error: Any) -> ConfigError:
    return ConfigError(f"server.token_ids: {error.message}", hint=error.hint)


def _of_model(name: str) -> str | None:
    """The encoding of a model of OpenAI's."""
    if find_spec("tiktoken") is None:
        return None
    from tiktoken.model import encoding_name_for_model

    try:
        return encoding_name_for_model(name)
    except KeyError:
        return None


async def _loaded(name: str) -> Encoding:
    """tiktoken fetches what it has not seen before. Raises `EngineUnavailable` where it cannot."""
    from tiktoken import get_encoding

    try:
        return await asyncio.to_thread(get_encoding, name)
    except Exception as error:
        raise EngineUnavailable(
            f"the encoding {name} of the token ids cannot be loaded ({type(error).__name__}).",
            hint="send text; or let the server reach tiktoken's files, or put them where TIKTOKEN_CACHE_DIR says",
        ) from error


def _text(encoding: Encoding, ids: Sequence[int], param: str) -> str:
    """A text that was cut within a character has a replacement for it."""
    try:
        return encoding.decode(list(ids))
    except (KeyError, OverflowError):
        what = f"{param} holds token ids that {encoding.name} does not have."
        raise bad_request(what, "send text, or ids of that encoding", param=param) from None
