"""Which engine one of the user's own models asks for, and how somebody would write it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from teola_plugin.engines.base import Engine
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.graph import PrimitiveKind

_PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Ends of names that no public name has (RFC 6761, 6762, 8375; `.internal` is reserved by ICANN)."""


def is_private(url: str) -> bool:
    """Whether an address is of this machine or a private network, by its spelling alone: nothing is looked up.

    Names without a dot are: containers of one compose file or cluster find each other by such ones.
    """
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        known = {socket.gethostname().lower(), socket.getfqdn().lower()} if "." in host else set()
        return bool(host) and ("." not in host or host.endswith(_PRIVATE) or host in known)


def computes_with(engine: Any, loaded: Any) -> bool:
    """Whether an engine was given that very model, or an equal one: then there is nothing else to compare."""
    given = getattr(engine, "given", None)
    if given is None or loaded is None:
        return False
    from teola_plugin.engines.sentence_transformers.loaded_models import same_model

    return same_model(given, loaded)


@dataclass(frozen=True, slots=True, eq=False)
class EngineSpec:
    """What engine a model wants. `dedicated` declares that it may be asked for what nobody waits for."""

    NAME: ClassVar[str]
    """What such an engine is called in a pool."""
    model: str
    dedicated: bool

    def make(self, name: str) -> Engine:
        """Not started. Raises what engines raise."""
        raise NotImplementedError

    def may_be(self, engine: Any) -> bool:
        """Whether it is an engine of the kind; whether it does the same is for `bind=` to say."""
        raise NotImplementedError

    def is_done_by(self, engine: Any) -> bool:
        """Whether it is such an engine as would be made."""
        raise NotImplementedError

    def written(self) -> str:
        """How it is made by hand."""
        raise NotImplementedError

    def place(self) -> str:
        """Where the work is done, in words."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class ServerSpec(EngineSpec):
    """An `OpenAIServer`."""

    NAME = "llm"
    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def make(self, name: str) -> Engine:
        from teola_plugin.engines.openai import OpenAIServer

        key = self.api_key if self.dedicated else None  # requests that are carried have their object's own
        return OpenAIServer(
            name, base_url=self.base_url, model=self.model, dedicated=self.dedicated, api_key=key, check=self.dedicated
        )

    def may_be(self, engine: Any) -> bool:
        return bool(getattr(engine, "carries_openai", False)) and engine.base_url == self.base_url

    def is_done_by(self, engine: Any) -> bool:
        return self.may_be(engine) and engine.dedicated == self.dedicated and engine.model == self.model

    def written(self) -> str:
        option = ", dedicated=True" if self.dedicated else ""
        return f"OpenAIServer(base_url={self.base_url!r}, model={self.model!r}{option})"

    def place(self) -> str:
        return self.base_url


@dataclass(frozen=True, slots=True, eq=False)
class _LoadedSpec(EngineSpec):
    """An engine that computes with a model that the user's object has loaded."""

    CLASS: ClassVar[str]
    KIND: ClassVar[PrimitiveKind]
    loaded: Any = field(repr=False)

    def may_be(self, engine: Any) -> bool:
        return self.KIND in engine.kinds and hasattr(engine, "model_name")  # what bind= compares itself with

    def is_done_by(self, engine: Any) -> bool:
        alike = self.may_be(engine) and engine.profile.dedicated == self.dedicated and self._same_settings(engine)
        return alike and computes_with(engine, self.loaded)

    def _same_settings(self, engine: Any) -> bool:
        return True

    def _settings(self) -> str:
        return ""

    def written(self) -> str:
        return f"{self.CLASS}(model={self.model!r}{self._settings()})"

    def place(self) -> str:
        return f"the model that it has loaded, on {self.loaded.device}"


@dataclass(frozen=True, slots=True, eq=False)
class EmbedderSpec(_LoadedSpec):
    """An `EmbeddingEngine`."""

    NAME = "embedder"
    CLASS = "EmbeddingEngine"
    KIND = PrimitiveKind.EMBEDDING
    normalize: bool
    prompts: Mapping[str, str]
    """By role; empty where the model puts nothing before its texts."""

    def make(self, name: str) -> Engine:
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
    """A `RerankingEngine`."""

    NAME = "reranker"
    CLASS = "RerankingEngine"
    KIND = PrimitiveKind.RERANKING

    def make(self, name: str) -> Engine:
        from teola_plugin.engines.sentence_transformers import RerankingEngine

        return RerankingEngine(name, self.loaded, dedicated=self.dedicated)


Wanted = EngineSpec | str
"""An engine, or why a model gets none by itself."""


def server_of(url: str, model: str, api_key: str | None, *, dedicated: bool) -> Wanted:
    """Of a model that talks to an OpenAI-compatible server."""
    shown = without_credentials(url).rstrip("/")
    if not is_private(shown):
        return f"{shown} is not known to be of this machine or a private network"
    return ServerSpec(model, dedicated, shown, api_key)


_NOT_THERE = "its model is not loaded yet, or the installed version keeps it elsewhere: use it once before accelerate()"


def embedder_of(model: str, loaded: Any, *, normalize: bool, prompts: Mapping[str, str], dedicated: bool) -> Wanted:
    """Of embeddings with that `SentenceTransformer`. `prompts`: what they put before texts, by role."""
    if loaded is None:
        return _NOT_THERE
    said = prompts if any(prompts.values()) or any(loaded.prompts.values()) else {}
    return EmbedderSpec(model, dedicated, loaded, normalize, said)


def reranker_of(model: str, loaded: Any, *, dedicated: bool) -> Wanted:
    """Of a reranker with that `CrossEncoder`."""
    return _NOT_THERE if loaded is None else RerankerSpec(model, dedicated, loaded)


def none_for(obj: Any) -> str:
    """Of a model that no engine is made for."""
    return f"no engine is made for a {type(obj).__name__} by itself"
