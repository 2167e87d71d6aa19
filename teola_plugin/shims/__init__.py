"""Every touch of a framework's private names, one module for each framework.

LangChain, LlamaIndex and vLLM promise to keep their public names only. Some of what this package does cannot be done by
them alone. So all of it stands here, each name in a small function that says whose it is, since which version it is as
expected, and what happens where it is not there: the plain, slower way, or an error that says what to install. Nothing
else in this package may touch such a name; `tests/support/private_names.py` looks for it in the source.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_log = logging.getLogger("teola_plugin")


def require(*distributions: str) -> None:
    """Check the installed versions of these packages against those that teola-plugin supports.

    Raises `RegistrationError` for a version that is too old. A version that is too new is logged once: what
    teola-plugin does not recognise in it runs as the original does. A package that is not installed is passed over.
    """
    for distribution in distributions:
        installed, supported = _installed(distribution), supported_versions(distribution)
        if not installed or supported is None or supported.contains(installed, prereleases=True):
            continue
        message = f"{distribution} {installed} is installed, and teola-plugin supports {_in_words(supported)}"
        if _is_too_old(installed, supported):
            raise RegistrationError(f"{message}.", hint=f"pip install -U '{distribution}{_in_words(supported)}'")
        _log_once(f"{message}. Objects that it does not recognise in that version run as the original does")


@cache
def supported_versions(distribution: str) -> SpecifierSet | None:
    """Return the versions of a package that teola-plugin's own metadata asks for.

    None if it asks for none, or if teola-plugin is not installed but only on the path.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        requirements = [Requirement(line) for line in metadata.requires("teola-plugin") or ()]
    except metadata.PackageNotFoundError:
        return None
    ranges = [one.specifier for one in requirements if canonicalize_name(one.name) == distribution and one.specifier]
    if not ranges:
        return None
    supported = ranges[0]
    for more in ranges[1:]:
        supported &= more
    return supported


def report_missing(distribution: str, name: str, consequence: str) -> None:
    """Log once that the installed version of a package lacks a private name that a shim reads, and what that costs."""
    installed, supported = _installed(distribution), supported_versions(distribution)
    tested = f" (teola-plugin supports {_in_words(supported)})" if supported is not None else ""
    _log_once(
        f"{distribution} {installed} has no {name!r}{tested}: {consequence}. Answers are unaffected, only later than "
        "they could be; this is said once"
    )


def _installed(distribution: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _in_words(supported: SpecifierSet) -> str:
    """Return a range with its floor first: `>=0.14.14,<0.15`."""
    return ",".join(sorted(map(str, supported), reverse=True))


def _is_too_old(installed: str, supported: SpecifierSet) -> bool:
    """Return True if a version is below the oldest one that is supported."""
    from packaging.version import Version

    floors = [Version(one.version) for one in supported if one.operator in (">=", ">", "==", "~=")]
    return any(Version(installed) < floor for floor in floors)


@cache
def _log_once(message: str) -> None:
    _log.warning(message)


# ------------------------------------------------------------ clients of vector stores

_CLIENT_ATTRIBUTES = {
    "langchain_chroma.vectorstores.Chroma": "_chroma_collection",
    "langchain_qdrant.qdrant.QdrantVectorStore": "_client",
    "llama_index.vector_stores.chroma.base.ChromaVectorStore": "_collection",
    "llama_index.vector_stores.qdrant.base.QdrantVectorStore": "_client",
}
"""By the class of a vector store: its attribute with the client that it searches with."""
_ASYNC_CLIENT_ATTRIBUTES = {"llama_index.vector_stores.qdrant.base.QdrantVectorStore": "_aclient"}
"""By the class of a vector store: its attribute with the client that its async searches await."""


def store_client(store: Any) -> Any:
    """Return the client with which a user's vector store searches; None for stores of other classes.

    Private: `_chroma_collection` of `Chroma` in langchain-chroma 1.0, `_client` of `QdrantVectorStore` in
    langchain-qdrant 1.0, `_collection` of `ChromaVectorStore` in llama-index-vector-stores-chroma 0.5, and `_client` of
    `QdrantVectorStore` in llama-index-vector-stores-qdrant 0.8. Subclasses may search otherwise, so they count as other
    classes. Without the attribute: None, and searches of the store share no calls.
    """
    name = _CLIENT_ATTRIBUTES.get(f"{type(store).__module__}.{type(store).__qualname__}")
    return None if name is None else getattr(store, name, None)


def with_store_client(store: Any, client: Any) -> Any:
    """Return a copy of a vector store for which `store_client` returns a client, which searches with this one."""
    copied = copy.copy(store)
    setattr(copied, _CLIENT_ATTRIBUTES[f"{type(store).__module__}.{type(store).__qualname__}"], client)
    return copied


def async_store_client(store: Any) -> Any:
    """Return the client that async searches of a user's vector store await; None for stores of other classes.

    Private: `_aclient` of `QdrantVectorStore` in llama-index-vector-stores-qdrant 0.10. Without the attribute: None,
    and async searches of the store share no calls.
    """
    name = _ASYNC_CLIENT_ATTRIBUTES.get(f"{type(store).__module__}.{type(store).__qualname__}")
    return None if name is None else getattr(store, name, None)


def is_embedded_client(client: Any) -> bool:
    """Return True for an async client of Qdrant that searches in this process, on the caller's loop, without waiting.

    Private: `_client` of `AsyncQdrantClient` in qdrant-client 1.20. Without the attribute: True, and its searches share
    calls only in a store that nobody writes to.
    """
    return type(getattr(client, "_client", None)).__name__ != "AsyncQdrantRemote"


@contextmanager
def async_store_client_replaced(store: Any, client: Any) -> Iterator[Any]:
    """Yield a copy of a vector store whose async searches await another client.

    What the copy notes of its collection in the body, the store notes, too: it asks the server for it only once.
    """
    name = _ASYNC_CLIENT_ATTRIBUTES[f"{type(store).__module__}.{type(store).__qualname__}"]
    copied = copy.copy(store)
    before = {**vars(copied), **copied.__pydantic_private__}
    setattr(copied, name, client)
    try:
        yield copied
    finally:
        for key, value in {**vars(copied), **copied.__pydantic_private__}.items():
            if key != name and value is not before.get(key):
                setattr(store, key, value)
