"""Tests of the public API: complete, sorted, importable, with errors that can be pickled and that name a remedy."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import teola_plugin
from teola_plugin import errors
from teola_plugin.lazy_names import lazy

ERRORS = {
    name: one for name, one in vars(errors).items() if isinstance(one, type) and one.__module__ == errors.__name__
}


def test_public_names_are_sorted_and_complete() -> None:
    assert teola_plugin.__all__ == sorted(teola_plugin.__all__)
    assert set(teola_plugin.__all__) == {"accelerate", "uninstall", "EnginePool", "Price", "Workflow", *ERRORS}


@pytest.mark.parametrize("name", teola_plugin.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(teola_plugin, name))
    assert name in dir(teola_plugin)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="acelerate"):
        teola_plugin.acelerate  # noqa: B018


def test_star_import_brings_public_names() -> None:
    code = "from teola_plugin import *; accelerate, EnginePool, TeolaError"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PUBLIC = {
    "teola_plugin.adapters.langchain.chat": ["ChatTeola"],
    "teola_plugin.adapters.langchain.rerank": ["TeolaCrossEncoder"],
    "teola_plugin.adapters.langchain.embeddings": ["TeolaEmbeddings"],
    "teola_plugin.adapters.langchain.indexing": ["TeolaIndexer"],
    "teola_plugin.adapters.langchain.vectorstore": ["TeolaVectorStore"],
    "teola_plugin.adapters.llamaindex": ["TeolaEmbedding", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"],
    "teola_plugin.cluster.deploy": ["up"],
    "teola_plugin.cluster.config": ["PoolConfig"],
    "teola_plugin.engines.base": ["Done", "Engine", "EngineLoad", "Failed", "Piece", "Request", "Result"],
    "teola_plugin.engines.conformance": ["EngineConformance"],
    "teola_plugin.engines": [
        *("EmbeddingEngine", "EmbeddingServer", "Engine", "FullTextSearch", "OpenAIServer", "PgVectorEngine"),
        *(
            "RerankingEngine",
            "RerankingServer",
            "ToolEngine",
            "ToolFunction",
            "VectorStoreEngine",
            "VllmEngine",
            "WebSearchEngine",
            "fake_engines",
        ),
    ],
    "teola_plugin.engines.fake": [
        *("FakeEmbedder", "FakeLLM", "FakeReranker", "FakeStore", "Faults", "fake_engines", "own_score"),
    ],
    "teola_plugin.engines.profiles": ["rtx3090"],
    "teola_plugin.langchain": [
        *("ChatTeola", "TeolaCrossEncoder"),
        *("TeolaEmbeddings", "TeolaIndexer", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"),
        *("TeolaWebSearch", "on_engine", "read_only", "tool_engine"),
    ],
    "teola_plugin.llamaindex": ["TeolaEmbedding", "TeolaLLM", "TeolaRerank", "TeolaVectorStore"],
    "teola_plugin.runtime.virtual_time": ["run_virtual"],
    "teola_plugin.workflow": [
        *("Branch", "Chunking", "Component", "Condition", "Config", "Decomposition", "Deployment", "Document"),
        *("Embedding", "Flow", "Function", "Generation", "Indexing", "Ingestion", "Input", "Kind", "Loop", "Map"),
        *("PER_QUERY", "Prompt", "QueryExpansion", "Reranking", "Result", "Running", "Searching", "Stream"),
        *("Synthesis", "Tool", "Value", "WebSearch", "Workflow", "on_engine", "reads", "setting"),
    ],
    "teola_plugin.simulation": ["Cluster", "arriving", "figures", "poisson", "run_alone", "simulate"],
}
"""What the documentation tells users to import."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_import_paths_are_stable(module: str) -> None:
    found = importlib.import_module(module)
    for name in PUBLIC[module]:
        assert getattr(found, name) is not None, name


@pytest.mark.parametrize("module", ["teola_plugin.engines", "teola_plugin.langchain", "teola_plugin.llamaindex"])
def test_public_modules_export_exactly_their_names(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__ == dir(found) == PUBLIC[module]
    with pytest.raises(AttributeError, match="Teola"):
        found.Teola  # noqa: B018


def fields(kind: type[errors.TeolaError]) -> dict[str, object]:
    """Return a value for every keyword of the error's constructor."""
    values = {"retryable": True, "story": ("admitted", "failed")}
    names = [name for name in inspect.signature(kind).parameters if name != "message"]
    return {name: values.get(name, f"the {name}") for name in names}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_survive_pickling_and_show_the_next_step(name: str) -> None:
    given = fields(ERRORS[name])
    made = ERRORS[name]("something is wrong.", **given)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made) and str(again) == str(made) and again.args == made.args
    assert {key: getattr(again, key) for key in given} == given
    assert str(made) == "something is wrong. Next: the hint"
    assert str(ERRORS[name]("alone.")) == "alone."


def test_error_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    drawn = {word for word in errors.__doc__.split() if word in ERRORS}
    assert drawn == set(ERRORS)
    assert all(issubclass(one, errors.TeolaError) for one in ERRORS.values())


def test_unknown_name_error_suggests_the_nearest() -> None:
    error = errors.unknown_name("engine", "lm", ["llm", "store"])
    assert str(error) == "unknown engine 'lm'; known: llm, store. Next: did you mean 'llm'?"


# ------------------------------------------------------------ packages that are not installed


@pytest.mark.parametrize(
    ("module", "package"),
    [("yaml", "PyYAML"), ("llama_index.core", "llama-index-core"), ("prometheus_client.core", "prometheus-client")],
)
def test_missing_package_error_uses_the_install_name(module: str, package: str) -> None:
    error = errors.missing_package("`teola serve`", module, "server")
    assert error.message == f"`teola serve` needs {package}, which is not installed."
    assert error.hint == errors.extra("server")
    assert isinstance(error, ImportError) and error.name == module


def test_first_missing_module_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "not_here", None)
    errors.require_modules("it", ("json", "email.message"), "server")
    with pytest.raises(errors.MissingPackage, match="it needs not-here"):
        errors.require_modules("it", ("json", "not_here.part", "nor_here"), "server")


def test_folder_named_like_a_package_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_like_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.MissingPackage, match="folder-like-a-package"):
        errors.require_modules("it", ("folder_like_a_package",), "server")


def test_public_name_with_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_much.py").write_text("import not_here_at_all\nname = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    get, _ = lazy("public", {"name": "needs_much"}, "openai")
    with pytest.raises(errors.MissingPackage, match=r"public\.name needs not-here-at-all") as caught:
        get("name")
    assert caught.value.hint == errors.extra("openai")
