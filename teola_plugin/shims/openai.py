"""Private names of the packages `openai` and `cohere`, which LangChain's and LlamaIndex's objects talk through.

Seen unchanged from openai 1.109 to 2.54, and from cohere 5.15 to 6.1.
"""

from __future__ import annotations

from typing import Any

from teola_plugin.errors import RegistrationError


def http_client(client: Any) -> Any:
    """Return the HTTP client (`httpx.Client` or `AsyncClient`) with which an `OpenAI` or `AsyncOpenAI` sends requests.

    Private: `_client` of `openai._base_client.BaseClient`. Without it: raises `RegistrationError`; the object stays
    unbound then.
    """
    http = getattr(client, "_client", None)
    if http is None:
        raise RegistrationError(
            f"the HTTP client of {type(client).__name__} cannot be found: this version of openai keeps it elsewhere.",
            hint="leave the object unbound, or install openai 2",
        )
    return http


def client_of_resource(resource: Any) -> Any:
    """Return the `OpenAI` or `AsyncOpenAI` that a resource of it (`client.embeddings`) sends requests with.

    Private: `_client` of `openai._resource.SyncAPIResource`. Without it: raises `RegistrationError`; the object stays
    unbound then.
    """
    client = getattr(resource, "_client", None)
    if client is None or not hasattr(client, "with_options"):
        raise RegistrationError(
            f"the client of {type(resource).__name__} is none of the package openai.",
            hint="leave the object unbound, or install openai 2",
        )
    return client


def has_dynamic_key(client: Any) -> bool:
    """Return True if a function of the user's gives the key of each request.

    Private: `_api_key_provider` of `OpenAI`. A version without it takes no such function (it came with it, in 1.106).
    """
    return getattr(client, "_api_key_provider", None) is not None


def cohere_server(client: Any) -> tuple[str, str | None] | None:
    """Return the address of the server that a `cohere.ClientV2` calls, and its key if that is a text.

    Private: `_client_wrapper` of `cohere.ClientV2`, and its `_token`. Without the former, and for another client: None;
    the object stays unbound then.
    """
    wrapper = getattr(client, "_client_wrapper", None)
    if wrapper is None or not any(cls.__name__ == "ClientV2" for cls in type(client).__mro__):
        return None
    token = getattr(wrapper, "_token", None)
    return str(wrapper.get_base_url()).rstrip("/"), token if isinstance(token, str) else None
