"""Sentence-transformers objects of LangChain on engines: served only where the engine computes what they compute."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from teola_plugin.adapters.engine_specs import (
    check_computes_here,
    check_model_name,
    check_prompt,
    computes_with,
    differs,
)
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaCrossEncoder
from teola_plugin.pool import EnginePool
from teola_plugin.shims.langchain import sentence_transformer
from teola_plugin.tracer.langchain.classes import find_override
from teola_plugin.tracer.leaf import EmbeddingLeaf

_EMBEDDINGS = ("langchain_huggingface.embeddings.huggingface", "langchain_community.embeddings.huggingface")
_CROSS_ENCODERS = ("langchain_community.cross_encoders.huggingface",)
_MODELS = ("ChatHuggingFace", "HuggingFacePipeline", "HuggingFaceEndpoint")
_DEVICE = ("device", "prompts", "default_prompt_name", "max_length")
"""Arguments of a model that are compared by themselves, or do not change what it computes."""
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"convert_to_numpy": (True,), "precision": (None, "float32")}
_COMPARED = ("normalize_embeddings", "prompt", "prompt_name", "batch_size", "device")
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def _class(modules: Iterable[str], name: str, obj: Any) -> type[Any] | None:
    """Return the class of that name that `obj` is an instance of; None without one. Imports no module."""
    classes = (getattr(sys.modules.get(module), name, None) for module in modules)
    return next((cls for cls in classes if cls is not None and isinstance(obj, cls)), None)


def is_own_decoder(obj: Any) -> bool:
    """Return True if an object decodes by Hugging Face's means: no engine answers in its words."""
    modules = ("langchain_huggingface", "langchain_community.llms", "langchain_community.chat_models")
    return any(_class(modules, name, obj) for name in _MODELS)


# ------------------------------------------------------------ embeddings


class _OneLineEmbeddings(TeolaEmbeddings):
    """Embeddings that turn line breaks into spaces first, as the object that they stand for does."""

    @staticmethod
    def sent(text: str) -> str:
        """Return what is embedded for a text."""
        return text.replace("\n", " ")

    def _call(self, texts: Iterable[str], role: Any, *, keep_remote: bool = False) -> Any:
        return super()._call([self.sent(text) for text in texts], role, keep_remote=keep_remote)

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> EmbeddingLeaf | None:
        """Return the leaf, for tracers that call `sent` first."""
        return super().__teola_leaf__(kwargs)


def is_embeddings(obj: Any) -> bool:
    return _class(_EMBEDDINGS, "HuggingFaceEmbeddings", obj) is not None


def prompts_of(obj: Any, client: Any) -> dict[str, str]:
    """Return what is put before texts, by the engine's role. `client`: the `SentenceTransformer` of the object."""
    return {role: _prompt_before_texts(client, encoding) for role, encoding in _encodings(obj).items()}


def _encodings(obj: Any) -> dict[str, Mapping[str, Any]]:
    return {"document": obj.encode_kwargs, "query": getattr(obj, "query_encode_kwargs", None) or obj.encode_kwargs}


def _prompt_before_texts(client: Any, encoding: Mapping[str, Any]) -> str:
    name = encoding.get("prompt_name") or client.default_prompt_name
    prompt = encoding.get("prompt") if encoding.get("prompt") is not None else client.prompts.get(name or "", "")
    return prompt or ""


def embeddings_on(obj: Any, engine: str, pool: EnginePool) -> TeolaEmbeddings:
    """Return embeddings that an engine makes in place of `obj`. Raises `RegistrationError` where they would differ."""
    cls = _class(_EMBEDDINGS, "HuggingFaceEmbeddings", obj)
    if cls is None:
        return TeolaEmbeddings(pool=pool, engine=engine)
    if other := find_override(obj, cls):
        raise differs(obj, f"{other} overrides how it embeds", "leave it unbound")
    server = pool.engine(engine)
    check_computes_here(obj, server, "EmbeddingEngine")
    if hasattr(server, "model_name"):
        _check_embedder(obj, server)
    return _OneLineEmbeddings(pool=pool, engine=engine)


def _check_embedder(obj: Any, server: Any) -> None:
    """Raise `RegistrationError` unless an `EmbeddingEngine` computes the vectors that the user's object computes.

    Compared are the model and its arguments, the prompts before texts, and the normalization, for queries and
    documents.
    """
    client = sentence_transformer(obj)
    if client is None:
        raise differs(obj, "its model cannot be looked at in the installed version", "leave it unbound")
    _check_model(obj, client, server, "EmbeddingEngine")
    kinds = {type(module).__name__ for module in client}
    if obj.multi_process or "Router" in kinds:
        reason = (
            "it embeds in many processes" if obj.multi_process else "its model tells queries from documents by itself"
        )
        raise differs(obj, reason, "leave it unbound")
    for role, encoding in _encodings(obj).items():
        _check_encoding(obj, encoding)
        _check_prompt(obj, client, server, role, encoding)
        if bool(encoding.get("normalize_embeddings")) != server.normalize and "Normalize" not in kinds:
            normalizes = bool(encoding.get("normalize_embeddings"))
            raise differs(
                obj,
                f"its {role} vectors have normalize_embeddings={normalizes}",
                f"EmbeddingEngine(normalize={normalizes})",
            )


def _check_encoding(obj: Any, encoding: Mapping[str, Any]) -> None:
    for name, value in encoding.items():
        if name not in _COMPARED and value not in _HARMLESS.get(name, ()):
            raise differs(obj, f"it encodes with {name}={value!r}", f"take {name} out of encode_kwargs")


def _check_prompt(obj: Any, client: Any, server: Any, role: str, encoding: Mapping[str, Any]) -> None:
    """Raise `RegistrationError` unless object and engine put the same before texts of a role (query, document)."""
    prompt = _prompt_before_texts(client, encoding)
    prompts = {**client.prompts, **server.prompts}
    prompt_name = next((one for one in _PROMPT_NAMES[role] if one in prompts), client.default_prompt_name)
    engine_prompt = prompts.get(prompt_name or "", "")
    check_prompt(obj, role, prompt, engine_prompt)


# ------------------------------------------------------------ rerankers


def is_cross_encoder(obj: Any) -> bool:
    return _class(_CROSS_ENCODERS, "HuggingFaceCrossEncoder", obj) is not None


def cross_encoder_on(obj: Any, engine: str, pool: EnginePool) -> TeolaCrossEncoder:
    """Return a cross encoder whose scores an engine makes in place of `obj`.

    Raises `RegistrationError` where they would differ.
    """
    cls = _class(_CROSS_ENCODERS, "HuggingFaceCrossEncoder", obj)
    assert cls is not None
    if other := find_override(obj, cls):
        raise differs(obj, f"{other} overrides how it scores", "leave it unbound")
    server: Any = pool.engine(engine)
    check_computes_here(obj, server, "RerankingEngine")
    if hasattr(server, "model_name"):
        _check_model(obj, obj.client, server, "RerankingEngine")
        max_length = obj.model_kwargs.get("max_length")
        if max_length != server.max_length and not computes_with(server, obj.client):
            hint = f"RerankingEngine(max_length={max_length})"
            raise differs(obj, f"it cuts pairs at max_length={max_length}, the engine at {server.max_length}", hint)
        if obj.client.config.num_labels != 1:
            raise differs(obj, f"its model gives {obj.client.config.num_labels} scores a pair", "leave it unbound")
    return TeolaCrossEncoder(pool=pool, engine=engine)


# ------------------------------------------------------------ models


def _check_model(obj: Any, client: Any, server: Any, kind: str) -> None:
    """Raise `RegistrationError` unless an engine computes with the object's model, or one loaded by the same arguments.

    The device does not matter. `kind`: the engine's class, for the message.
    """
    if computes_with(server, client):
        return
    check_model_name(obj, obj.model_name, server, kind)
    model_kwargs = {key: value for key, value in obj.model_kwargs.items() if key not in _DEVICE}
    engine_kwargs = {key: value for key, value in server.options.items() if key not in _DEVICE}
    if model_kwargs != engine_kwargs:
        raise differs(
            obj,
            f"its model is made with model_kwargs {model_kwargs}, the engine's with {engine_kwargs}",
            f"{kind}(options={model_kwargs})",
        )
