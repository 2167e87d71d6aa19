"""Private names of `openai`, `cohere` and `huggingface_hub`, which LangChain's and LlamaIndex's objects talk through.

Seen unchanged from openai 1.109 to 2.54, from cohere 5.15 to 6.1, and in huggingface_hub from 1.0 to 1.33.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
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


def inference_address(client: Any) -> str | None:
    """Return the address that an `InferenceClient` or `AsyncInferenceClient` of `huggingface_hub` sends requests to.

    Empty if it names a model on the hub. None for another client, also of a subclass, and before `huggingface_hub` 1,
    which did not use `httpx`.

    Private: `_inner_post` of `InferenceClient`, `_get_async_client` of `AsyncInferenceClient`. Without them: None; the
    object stays unbound then.
    """
    hub: Any = sys.modules.get("huggingface_hub")
    if hub is None or not hasattr(hub, "get_async_session"):
        return None
    private_name = {hub.InferenceClient: "_inner_post", hub.AsyncInferenceClient: "_get_async_client"}.get(type(client))
    if private_name is None or not hasattr(client, private_name):
        return None
    model = client.model
    return model if isinstance(model, str) and model.startswith(("http://", "https://")) else ""


def inference_client_on(client: Any, make_http_client: Callable[[Any], Any]) -> Any:
    """Return a copy of a client for which `inference_address` is not None, that sends requests by another HTTP client.

    `make_http_client`: returns it for the HTTP client that `huggingface_hub` would use. Errors are those of the
    original client.

    Private: `_inner_post` of `InferenceClient`, `_get_async_client` of `AsyncInferenceClient`; since huggingface_hub
    1.0. Without them: `inference_address` is None.
    """
    hub: Any = sys.modules["huggingface_hub"]
    copied = copy(client)
    if isinstance(client, hub.AsyncInferenceClient):
        on_loop = make_http_client(hub.get_async_session())

        async def get_async_client() -> Any:
            return on_loop

        copied._get_async_client = get_async_client
        return copied
    clients: dict[str, Any] = {}

    def post(request: Any, *, stream: bool = False) -> Any:
        """Send a request as `InferenceClient._inner_post` does, of which the steps for embeddings are here."""
        if stream:
            return client._inner_post(request, stream=True)
        session = hub.get_session()
        if clients.get("session") is not session:  # it is another one after `huggingface_hub.close_session()`
            clients.update(session=session, http=make_http_client(session))
        content = {"json": request.json, "content": request.data, "headers": request.headers}
        options = {"cookies": client.cookies, "timeout": client.timeout}
        with clients["http"].stream("POST", request.url, **content, **options) as response:
            response.read()
        try:
            hub.utils.hf_raise_for_status(response)
        except hub.errors.HfHubHTTPError as error:
            if response.status_code == 422 and response.text:
                error.args = (f"{error.args[0]}{os.linesep}{response.text}{os.linesep}", *error.args[1:])
            raise
        return response.content

    copied._inner_post = post
    return copied
