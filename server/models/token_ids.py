"""Inputs that are token ids. Only their encoding tells which text they are, and the protocol does not name it.

Ids are of the encoding that tiktoken has for the model's name, as with OpenAI's own models. Clients that do not know a
name choose one themselves: LangChain's `OpenAIEmbeddings` chooses `cl100k_base`. vLLM's server reads all ids as those
of its model's tokenizer, so that such a client gets vectors of other texts. Here the settings name the encoding, or ids
are refused.
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
    """The encodings of token ids that clients send, by model."""

    def __init__(self, encodings: Mapping[str, str], models: Iterable[str]) -> None:
        """Check the `encodings` that the settings name. Raise `ConfigError` for an unknown model or encoding."""
        self._encodings = dict(encodings)
        names = sorted(models)
        for model, encoding in self._encodings.items():
            if model not in names:
                raise _to_config_error(unknown_name("model", model, names))
            _check_encoding(encoding)

    async def texts(self, value: str | Sequence[Any], param: str, names: Sequence[str]) -> list[str]:
        """Return the texts of a request's input: a text, texts, the ids of one text, or lists of ids.

        `names`: those of the model that the request and the settings use. Raise `HttpError`.
        """
        items = [value] if isinstance(value, str) else list(value)
        if items and isinstance(items[0], int):
            items = [items]
        if not items or any(not one for one in items if not isinstance(one, str)):
            raise bad_request(f"{param} is empty.", "give a text, or a list of texts", param=param)
        if all(isinstance(one, str) for one in items):
            return items
        encoding = await _load_encoding(self._encoding(param, names))
        return [one if isinstance(one, str) else _decode(encoding, one, param) for one in items]

    def _encoding(self, param: str, names: Sequence[str]) -> str:
        """Return the encoding of the token ids that a client sends: that of the settings, else that of a model of
        OpenAI's.

        `names`: the names of the requested model. Raise `HttpError` if there is none.
        """
        for name in names:
            if encoding := self._encodings.get(name) or _openai_encoding(name):
                return encoding
        raise bad_request(
            f"{param} holds tokens instead of text, and nobody has said of which encoding.",
            f"send text, or say it in the pool's file: server: token_ids: {{{names[-1]}: cl100k_base}} (which is what "
            "LangChain's OpenAIEmbeddings sends, unless check_embedding_ctx_length=False)",
            param=param,
            code="unsupported",
        )


def _check_encoding(encoding: str) -> None:
    """Raise `ConfigError` for an encoding of the settings that tiktoken does not have, or if tiktoken is missing."""
    if find_spec("tiktoken") is None:
        raise ConfigError("server.token_ids needs tiktoken, which is not installed.", hint="pip install tiktoken")
    from tiktoken import list_encoding_names

    if encoding not in list_encoding_names():
        raise _to_config_error(unknown_name("encoding", encoding, list_encoding_names()))


def _to_config_error(error: Any) -> ConfigError:
    return ConfigError(f"server.token_ids: {error.message}", hint=error.hint)


def _openai_encoding(name: str) -> str | None:
    """Return the encoding of a model of OpenAI's; None for other models."""
    if find_spec("tiktoken") is None:
        return None
    from tiktoken.model import encoding_name_for_model

    try:
        return encoding_name_for_model(name)
    except KeyError:
        return None


async def _load_encoding(name: str) -> Encoding:
    """Load an encoding, which tiktoken may have to download. Raise `EngineUnavailable` if that fails."""
    from tiktoken import get_encoding

    try:
        return await asyncio.to_thread(get_encoding, name)
    except Exception as error:
        raise EngineUnavailable(
            f"the encoding {name} of the token ids cannot be loaded ({type(error).__name__}).",
            hint="send text; or let the server reach tiktoken's files, or put them where TIKTOKEN_CACHE_DIR says",
        ) from error


def _decode(encoding: Encoding, ids: Sequence[int], param: str) -> str:
    """Return the text of the ids. A character that was cut becomes the replacement character."""
    try:
        return encoding.decode(list(ids))
    except (KeyError, OverflowError):
        message = f"{param} holds token ids that {encoding.name} does not have."
        raise bad_request(message, "send text, or ids of that encoding", param=param) from None
