"""Specifications of the engines that can serve the user's own models, and the lines that create them by hand."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from teola_plugin.engines.base import Engine
from teola_plugin.engines.openai.embedding_server import embeds_in_tei_form
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind

_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Ends of names that no public name has (RFC 6761, 6762, 8375; `.internal` is reserved by ICANN)."""


def is_private(url: str) -> bool:
    """Return True for an address of this machine or a private network, by its spelling alone: nothing is looked up.

    Names without a dot are private: containers of one compose file or cluster find each other by such names.
    """
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        own_names = {socket.gethostname().lower(), socket.getfqdn().lower()} if "." in host else set()
        return bool(host) and ("." not in host or host.endswith(_PRIVATE) or host in own_names)


def computes_with(engine: Any, loaded: Any) -> bool:
    """Return True if an engine computes with that very model, or with an equal one."""
    model = getattr(engine, "loaded_model", None)
    if model is None or loaded is None:
        return False
    from teola_plugin.engines.sentence_transformers.loaded_models import same_model

    return same_model(model, loaded)


# ------------------------------------------------------------ what an object and an engine must have in common


def differs(obj: Any, reason: str, hint: str) -> RegistrationError:
    """Return the error for an object that the engine would not serve as it serves itself."""
    return RegistrationError(f"{type(obj).__name__} cannot be served by the engine: {reason}.", hint=hint)


def check_server(obj: Any, url: Any, model: str | None, engine: Any, kind: str = "OpenAIServer") -> None:
    """Raise `RegistrationError` unless an object asks the server and the model that the engine asks.

    `kind`: the engine's class. `model`: None for an object that names none.
    """
    base_url, engine_url = without_credentials(str(url)).rstrip("/"), getattr(engine, "base_url", "no server")
    if base_url != engine_url:
        reason = f"it talks to {base_url}, the engine {engine.name!r} to {engine_url}"
        raise differs(obj, reason, f"{kind}(base_url={base_url!r}, ...)")
    if None not in (engine.model, model) and model != engine.model:
        reason = f"it asks for {model!r}, the engine {engine.name!r} for {engine.model!r}"
        raise differs(obj, reason, f"{kind}(model={model!r}, ...)")


def check_computes_here(obj: Any, engine: Any, kind: str) -> None:
    """Raise `RegistrationError` for an engine on a server: an object that has loaded its model computes by itself.

    `kind`: the class of the engines that can stand for it.
    """
    if hasattr(engine, "base_url"):
        reason = f"it computes in this process, the engine {engine.name!r} on {engine.base_url}"
        raise differs(obj, reason, f"{kind}(...), or leave it unbound")


def check_model_name(obj: Any, name: str, engine: Any, kind: str) -> None:
    """Raise `RegistrationError` unless both load the same model. `kind`: the engine's class."""
    paths = Path(name), Path(engine.model_name)
    if all(path.is_dir() for path in paths):
        is_same = paths[0].resolve() == paths[1].resolve()
    else:
        is_same = name.removeprefix(_PUBLISHER) == engine.model_name.removeprefix(_PUBLISHER)
    if not is_same:
        raise differs(obj, f"it runs {name!r}, the engine {engine.model_name!r}", f"{kind}(model={name!r})")


_PUBLISHER = "sentence-transformers/"


def check_prompt(obj: Any, role: str, own_prompt: str, engine_prompt: str) -> None:
    """Raise `RegistrationError` unless both put the same before texts of a role."""
    if own_prompt != engine_prompt:
        hint = f"EmbeddingEngine(prompts={{{role!r}: {own_prompt!r}, ...}})"
        raise differs(obj, f"it puts {own_prompt!r} before a {role}, the engine {engine_prompt!r}", hint)


# ------------------------------------------------------------ engines


@dataclass(frozen=True, slots=True, eq=False)
class EngineSpec:
    """The engine that can serve a model. `dedicated` declares that it may get requests that nobody waits for."""

    NAME: ClassVar[str]
    """The name of such an engine in a pool."""
    model: str
    dedicated: bool

    def create(self, name: str) -> Engine:
        """Create the engine, not started. Raise what engines raise."""
        raise NotImplementedError

    def is_kind_of(self, engine: Any) -> bool:
        """Return True for an engine of the kind; `bind=` decides whether it does the same."""
        raise NotImplementedError

    def matches(self, engine: Any) -> bool:
        """Return True for an engine as `create` would create it."""
        raise NotImplementedError

    def source_line(self) -> str:
        """Return the Python expression that creates it."""
        raise NotImplementedError

    def location(self) -> str:
        """Say where the work is done."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class ServerSpec(EngineSpec):
    """The specification of an `OpenAIServer`."""

    NAME = "llm"
    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def create(self, name: str) -> Engine:
        """Create an `OpenAIServer`.

        Only a dedicated one gets an API key and checks its server first: otherwise each request carries the key of the
        user's own object.
        """
        from teola_plugin.engines.openai import OpenAIServer

        key = self.api_key if self.dedicated else None  # requests that are carried have their object's own
        return OpenAIServer(
            name, base_url=self.base_url, model=self.model, dedicated=self.dedicated, api_key=key, check=self.dedicated
        )

    def is_kind_of(self, engine: Any) -> bool:
        return bool(getattr(engine, "carries_openai", False)) and engine.base_url == self.base_url

    def matches(self, engine: Any) -> bool:
        return self.is_kind_of(engine) and engine.dedicated == self.dedicated and engine.model == self.model

    def source_line(self) -> str:
        option = ", dedicated=True" if self.dedicated else ""
        return f"OpenAIServer(base_url={self.base_url!r}, model={self.model!r}{option})"

    def location(self) -> str:
        return self.base_url


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingServerSpec(ServerSpec):
    """The specification of an `EmbeddingServer`."""

    NAME = "embedder"

    def create(self, name: str) -> Engine:
        """Create an `EmbeddingServer`, which sends nothing to its server before the first request."""
        from teola_plugin.engines.openai import EmbeddingServer

        # Requests are carried with their object's own key. Nothing is asked of the server before the first of them.
        return EmbeddingServer(
            name, base_url=self.base_url, model=self.model, api_key=None, dedicated=self.dedicated, check=False
        )

    def is_kind_of(self, engine: Any) -> bool:
        return bool(getattr(engine, "carries_embeddings", False)) and engine.base_url == self.base_url

    def source_line(self) -> str:
        option = ", dedicated=True" if self.dedicated else ""
        return f"EmbeddingServer(base_url={self.base_url!r}, model={self.model!r}{option})"


@dataclass(frozen=True, slots=True, eq=False)
class EndpointSpec(EmbeddingServerSpec):
    """The specification of an `EmbeddingServer` for embeddings that name the address of a server, and no model."""

    def is_kind_of(self, engine: Any) -> bool:
        is_embedder = bool(getattr(engine, "carries_embeddings", False))
        return is_embedder and embeds_in_tei_form(self.base_url, engine.base_url)

    def source_line(self) -> str:
        option = ", dedicated=True" if self.dedicated else ""
        return f"EmbeddingServer(base_url={self.base_url!r}{option})"


@dataclass(frozen=True, slots=True, eq=False)
class RerankingServerSpec(ServerSpec):
    """The specification of a `RerankingServer`, in Cohere's form."""

    NAME = "reranker"

    def create(self, name: str) -> Engine:
        """Create a `RerankingServer` in Cohere's form, which sends nothing to its server before the first request."""
        from teola_plugin.engines.openai import RerankingServer

        return RerankingServer(
            name,
            base_url=self.base_url,
            model=self.model,
            api_key=self.api_key,
            form="cohere",
            dedicated=self.dedicated,
            check=False,
        )

    def is_kind_of(self, engine: Any) -> bool:
        return getattr(engine, "form", None) == "cohere" and engine.base_url == self.base_url

    def source_line(self) -> str:
        option = ", dedicated=True" if self.dedicated else ""
        return f"RerankingServer(base_url={self.base_url!r}, model={self.model!r}, form='cohere'{option})"


@dataclass(frozen=True, slots=True, eq=False)
class _LoadedSpec(EngineSpec):
    """An engine that computes with a model that the user's object has loaded."""

    CLASS: ClassVar[str]
    KIND: ClassVar[PrimitiveKind]
    loaded: Any = field(repr=False)

    def is_kind_of(self, engine: Any) -> bool:
        return self.KIND in engine.kinds and hasattr(engine, "model_name")  # what bind= compares itself with

    def matches(self, engine: Any) -> bool:
        is_same = self.is_kind_of(engine) and engine.profile.dedicated == self.dedicated and self._same_settings(engine)
        return is_same and computes_with(engine, self.loaded)

    def _same_settings(self, engine: Any) -> bool:
        return True

    def _settings(self) -> str:
        return ""

    def source_line(self) -> str:
        return f"{self.CLASS}(model={self.model!r}{self._settings()})"

    def location(self) -> str:
        return f"the model that it has loaded, on {self.loaded.device}"


@dataclass(frozen=True, slots=True, eq=False)
class EmbedderSpec(_LoadedSpec):
    """The specification of an `EmbeddingEngine`."""

    NAME = "embedder"
    CLASS = "EmbeddingEngine"
    KIND = PrimitiveKind.EMBEDDING
    normalize: bool
    prompts: Mapping[str, str]
    """Prompts by role; empty if the model puts nothing before its texts."""

    def create(self, name: str) -> Engine:
        """Create an `EmbeddingEngine` that computes with the very model that the user's object has loaded."""
        from teola_plugin.engines.sentence_transformers import EmbeddingEngine

        return EmbeddingEngine(
            name, self.loaded, normalize=self.normalize, prompts=self.prompts, dedicated=self.dedicated
        )

    def _same_settings(self, engine: Any) -> bool:
        return bool(engine.normalize == self.normalize and engine.prompts == dict(self.prompts))

    def _settings(self) -> str:
        prompts = f", prompts={dict(self.prompts)!r}" if self.prompts else ""
        return f"{', normalize=True' if self.normalize else ''}{prompts}"


@dataclass(frozen=True, slots=True, eq=False)
class RerankerSpec(_LoadedSpec):
    """The specification of a `RerankingEngine`."""

    NAME = "reranker"
    CLASS = "RerankingEngine"
    KIND = PrimitiveKind.RERANKING

    def create(self, name: str) -> Engine:
        from teola_plugin.engines.sentence_transformers import RerankingEngine

        return RerankingEngine(name, self.loaded, dedicated=self.dedicated)


SpecOrReason = EngineSpec | str
"""The specification of an engine, or the reason why a model gets none by itself."""


def server_spec(
    url: str, model: str, api_key: str | None, *, dedicated: bool, kind: type[ServerSpec] = ServerSpec
) -> SpecOrReason:
    """Specify the engine for a model that talks to an OpenAI-compatible server."""
    address = without_credentials(url).rstrip("/")
    if not is_private(address):
        return f"{address} is not known to be of this machine or a private network"
    return kind(model, dedicated, address, api_key)


_NOT_THERE = "its model is not loaded yet, or the installed version keeps it elsewhere: use it once before accelerate()"


def embedder_spec(
    model: str, loaded: Any, *, normalize: bool, prompts: Mapping[str, str], dedicated: bool
) -> SpecOrReason:
    """Specify the engine for embeddings with that `SentenceTransformer`. `prompts`: the prefixes of texts, by role."""
    if loaded is None:
        return _NOT_THERE
    role_prompts = prompts if any(prompts.values()) or any(loaded.prompts.values()) else {}
    return EmbedderSpec(model, dedicated, loaded, normalize, role_prompts)


def reranker_spec(model: str, loaded: Any, *, dedicated: bool) -> SpecOrReason:
    """Specify the engine for a reranker with that `CrossEncoder`."""
    return _NOT_THERE if loaded is None else RerankerSpec(model, dedicated, loaded)


def reason_for_none(obj: Any) -> str:
    """Return the reason for a model that no engine is made for."""
    return f"no engine is made for a {type(obj).__name__} by itself"
