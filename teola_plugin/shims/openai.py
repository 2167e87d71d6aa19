"""Private names of the `openai` package, which LangChain's and LlamaIndex's OpenAI objects talk through.

Seen unchanged from openai 1.109 to 2.54.
"""

from __future__ import annotations

from typing import Any

from teola_plugin.errors import RegistrationError


def http_client(client: Any) -> Any:
    """The HTTP client (`httpx.Client`, `httpx.AsyncClient`) that an `OpenAI` or `AsyncOpenAI` sends its requests with.

    Private: `_client` of `openai._base_client.BaseClient`. Without it: raises `RegistrationError`; the object stays
    unbound then.
    """
    found = getattr(client, "_client", None)
    if found is None:
        raise RegistrationError(
            f"the HTTP client of {type(client).__name__} cannot be found: this version of openai keeps it elsewhere.",
            hint="leave the object unbound, or install openai 2",
        )
    return found


def key_is_asked_for(client: Any) -> bool:
    """Whether a function of the user's is asked for the key of each request.

    Private: `_api_key_provider` of `OpenAI`. A version without it takes no such function (it came with it, in 1.106).
    """
    return getattr(client, "_api_key_provider", None) is not None
