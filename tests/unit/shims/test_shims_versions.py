"""Tests of versions of frameworks: the supported ones, and the messages for others or for missing private names."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.tools import BaseTool, tool
from langchain_core.tracers import context as tracers
from langchain_openai import ChatOpenAI
from langchain_text_splitters import CharacterTextSplitter
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from langgraph.pregel._read import PregelNode
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import Refine, TreeSummarize
from packaging.version import Version

from teola_plugin import shims
from teola_plugin.errors import RegistrationError
from teola_plugin.shims import langchain, langchain_agents, langgraph
from teola_plugin.shims.llamaindex import copies, records, retrieval, synthesizers, workflows
from teola_plugin.tracer.llamaindex.classes import refuse_unknown_attributes
from teola_plugin.tracer.llamaindex.trace import trace
from teola_plugin.tracer.symbols import NotUnderstood

REQUIREMENTS = [
    "rich>=13",
    'llama-index-core>=0.14.14,<0.15; extra == "llamaindex"',
    'llama_index.core>=0.14.2; extra == "dev"',
    'langgraph>=1.2,<2; extra == "langgraph"',
]


@pytest.fixture(autouse=True)
def installation(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Return installed versions by distribution, which a test may change. Earlier log messages are forgotten."""
    versions = {"llama-index-core": "0.14.20", "langgraph": "1.2.3"}
    monkeypatch.setattr(shims.metadata, "requires", lambda name: REQUIREMENTS)
    monkeypatch.setattr(shims, "_installed", lambda name: versions.get(name, ""))
    shims.supported_versions.cache_clear()
    shims._log_once.cache_clear()
    yield versions
    shims.supported_versions.cache_clear()
    shims._log_once.cache_clear()


# ------------------------------------------------------------ supported versions


@pytest.mark.parametrize("version", ["0.14.14", "0.14.25", "0.14.30rc1"])
def test_a_supported_version_is_accepted(
    installation: dict[str, str], version: str, caplog: pytest.LogCaptureFixture
) -> None:
    installation["llama-index-core"] = version
    shims.require("llama-index-core", "langgraph")
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.13.6", "0.14.13"])
def test_too_old_version_raises_error_with_install_command(installation: dict[str, str], version: str) -> None:
    installation["llama-index-core"] = version
    with pytest.raises(RegistrationError) as caught:
        shims.require("langgraph", "llama-index-core")
    assert f"llama-index-core {version} is installed" in caught.value.message
    assert caught.value.hint == "pip install -U 'llama-index-core>=0.14.2,>=0.14.14,<0.15'"


def test_a_version_that_is_too_new_is_logged_once(
    installation: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installation["langgraph"] = "2.0.1"
    shims.require("langgraph")
    shims.require("langgraph")
    [message] = caplog.messages
    assert "langgraph 2.0.1 is installed, and teola-plugin supports >=1.2,<2" in message


def test_uninstalled_or_unrequired_packages_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    shims.require("langgraph-prebuilt", "numpy")
    assert caplog.messages == []


def test_versions_are_not_checked_if_teola_plugin_is_not_installed(
    installation: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise shims.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(shims.metadata, "requires", requires)
    installation["llama-index-core"] = "0.13.0"
    shims.require("llama-index-core")


@pytest.mark.parametrize(
    ("package", "distribution"),
    [
        ("langchain", "langchain-core"),
        ("langgraph", "langgraph"),
        ("langgraph", "langgraph-prebuilt"),
        ("llamaindex", "llama-index-core"),
        ("llamaindex", "llama-index-workflows"),
    ],
)
def test_each_adapter_checks_its_framework_when_it_is_imported(
    installation: dict[str, str], monkeypatch: pytest.MonkeyPatch, package: str, distribution: str
) -> None:
    monkeypatch.setattr(shims.metadata, "requires", lambda name: [f"{distribution}>=2000"])
    installation[distribution] = "1.0"
    with pytest.raises(RegistrationError, match=f"{distribution} 1.0 is installed"):
        importlib.reload(importlib.import_module(f"teola_plugin.adapters.{package}"))


# ------------------------------------------------------------ private names that are missing


class Model(GenericFakeChatModel):
    """A chat model that takes tools and never answers."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def _remove_name(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.delattr(owner, name)


def _no_hooks(patch: pytest.MonkeyPatch) -> Any:
    _remove_name(patch, tracers, "_configure_hooks")
    return langchain.listeners_are_known()


def _no_streaming_handlers(patch: pytest.MonkeyPatch) -> Any:
    _remove_name(patch, importlib.import_module("langchain_core.tracers._streaming"), "_V2StreamingCallbackHandler")
    return langchain.listeners_are_known()


def _no_default_params(patch: pytest.MonkeyPatch) -> Any:
    class Other:
        _use_responses_api = ChatOpenAI._use_responses_api

    return langchain.chat_completion_params(Other(), {})


def _no_chunk_size(patch: pytest.MonkeyPatch) -> Any:
    splitter = CharacterTextSplitter()
    del splitter._chunk_size
    return langchain.splitter_sizes(splitter)


def _no_agent_variables(patch: pytest.MonkeyPatch) -> Any:
    graph = create_agent(Model(messages=iter(())), [add])
    patch.setattr(langchain_agents, "_closure", lambda function: {})
    return langchain_agents.agent_model(graph)


def _no_react_variables(patch: pytest.MonkeyPatch) -> Any:
    graph = create_react_agent(Model(messages=iter(())), [add])
    patch.setattr(langchain_agents, "_closure", lambda function: {})
    return langchain_agents.react_model(graph)


def _no_arguments(patch: pytest.MonkeyPatch) -> Any:
    _remove_name(patch, BaseTool, "_to_args_and_kwargs")
    return langchain_agents.call_arguments(add, {"a": 1})


def _no_run_one(patch: pytest.MonkeyPatch) -> Any:
    node = ToolNode([add])
    _remove_name(patch, ToolNode, "_run_one")
    return langchain_agents.tool_node_parts(node)


def _no_node(patch: pytest.MonkeyPatch) -> Any:
    graph = StateGraph(MessagesState).add_node("one", lambda state: state).add_edge(START, "one").compile()
    node = graph.nodes["one"]
    patch.setattr(PregelNode, "node", property(lambda self: self.bound))
    return langgraph.watched_node(node, lambda run: None).node is None


def _no_reader(patch: pytest.MonkeyPatch) -> Any:
    return langgraph.state_of({"configurable": {}}, ["messages"])


def _no_callable(patch: pytest.MonkeyPatch) -> Any:
    _remove_name(patch, importlib.import_module("langgraph._internal._runnable"), "RunnableCallable")
    langgraph._callable_class.cache_clear()
    patch.setattr(langgraph, "_callable_class", langgraph._callable_class.__wrapped__)
    return langgraph.functions_of(object())


def _no_task(patch: pytest.MonkeyPatch) -> Any:
    _remove_name(patch, importlib.import_module("langgraph.func"), "_TaskFunction")
    patch.setattr(langgraph, "_task_class", langgraph._task_class.__wrapped__)
    return langgraph.task_of(object())


def _no_adapter(patch: pytest.MonkeyPatch) -> Any:
    return workflows.intercept_result(SimpleNamespace(), lambda result, cancel: result())  # type: ignore[arg-type]


def _no_steps(patch: pytest.MonkeyPatch) -> Any:
    return workflows.step_names(SimpleNamespace())


def _no_used_steps(patch: pytest.MonkeyPatch) -> Any:
    return list(workflows.objects_used_by_steps(SimpleNamespace()))


def _no_prompt(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(copies, "_FORMAT_METHODS", ("format", "renamed"))
    return copies._caching_template_class.__wrapped__()


MISSING: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], str]] = {
    "langchain-core": (_no_hooks, "_configure_hooks"),
    "langchain-core, handlers": (_no_streaming_handlers, "_V2StreamingCallbackHandler"),
    "langchain-core, tools": (_no_arguments, "BaseTool._to_args_and_kwargs"),
    "langchain-openai": (_no_default_params, "Other._default_params"),
    "langchain-text-splitters": (_no_chunk_size, "CharacterTextSplitter._chunk_size"),
    "langchain": (_no_agent_variables, "create_agent("),
    "langgraph-prebuilt": (_no_react_variables, "create_react_agent("),
    "langgraph-prebuilt, tools": (_no_run_one, "ToolNode._run_one"),
    "langgraph": (_no_node, "PregelNode.node"),
    "langgraph, state": (_no_reader, "__pregel_read"),
    "langgraph, functions": (_no_callable, "RunnableCallable"),
    "langgraph, tasks": (_no_task, "_TaskFunction"),
    "llama-index-workflows": (_no_adapter, "WorkflowHandler._external_adapter"),
    "llama-index-workflows, steps": (_no_steps, "Workflow._get_steps"),
    "llama-index-workflows, names": (_no_used_steps, "Workflow._get_steps"),
    "llama-index-core": (_no_prompt, "RichPromptTemplate(Prompt)"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_private_name_that_is_missing_is_logged_once(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, name = MISSING[case]
    with monkeypatch.context() as patch:
        first = read(patch)
    with monkeypatch.context() as patch:
        read(patch)
    assert not first
    [message] = [record.message for record in caplog.records if record.name == "teola_plugin"]
    assert message.startswith(f"{case.partition(',')[0]} ")
    assert name in message
    assert "Answers are unaffected" in message


def test_missing_llamaindex_attribute_is_logged_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    synthesizer = Refine(MockLLM())
    del synthesizer._text_qa_template
    rows = list(trace(synthesizer, "respond").traced.report)
    assert "it has no '_text_qa_template'" in rows[0].reason
    [message] = caplog.messages
    assert "llama-index-core 0.14.20 has no 'Refine._text_qa_template'" in message


def test_missing_llamaindex_method_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(synthesizers.TreeSummarizeParts, "METHODS", ("_renamed",))
    with pytest.raises(records.Unreadable, match="no method '_renamed'"):
        synthesizers.TreeSummarizeParts.of(TreeSummarize(MockLLM()))
    [message] = caplog.messages
    assert "'TreeSummarize._renamed'" in message


def test_attribute_missing_during_planning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotUnderstood, match="it has no '_renamed'"), refuse_unknown_attributes():
        _ = TreeSummarize(MockLLM())._renamed  # type: ignore[attr-defined]
    [message] = caplog.messages
    assert "'TreeSummarize._renamed'" in message


def test_missing_attribute_of_a_user_class_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Own(TreeSummarize):
        def __init__(self) -> None: ...

    with caplog.at_level(logging.INFO), pytest.raises(records.Unreadable):
        synthesizers.TreeSummarizeParts.of(Own())
    assert caplog.messages == []


# ------------------------------------------------------------ LlamaIndex before 0.14.25


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_INSTALLED", Version("0.14.14"))


def test_later_names_are_not_expected_of_an_older_version(old: None) -> None:
    assert records.is_older_than("0.14.22")
    assert records.methods_since("0.14.22", "_new") == ()
    assert records.default_before("0.14.22", None) is None


def test_names_are_expected_from_their_first_version_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_INSTALLED", Version("0.14.22"))
    assert not records.is_older_than("0.14.22")
    assert records.methods_since("0.14.22", "_new") == ("_new",)
    assert records.default_before("0.14.22", None) is records._MISSING


def test_reranker_of_older_version_has_batches_and_arguments(old: None) -> None:
    nodes = [SimpleNamespace(node=number) for number in range(5)]
    step: Any = SimpleNamespace(choice_batch_size=2, _format_node_batch_fn=str)
    assert retrieval.batches(step, nodes) == [[0, 1], [2, 3], [4]]  # type: ignore[arg-type,comparison-overlap]
    assert retrieval.batch_arguments(step, [0, 1], "why?") == {"context_str": "[0, 1]", "query_str": "why?"}  # type: ignore[list-item]


def test_accumulate_of_older_version_has_chunk_arguments(old: None) -> None:
    synthesizer: Any = SimpleNamespace()
    assert synthesizers.chunk_arguments(synthesizer, "oats") == {"context_str": "oats"}


def test_prompt_helper_copy_of_older_version_keeps_its_token_counter(old: None) -> None:
    synthesizer = TreeSummarize(MockLLM())
    helper = copies.copy_prompt_helper(synthesizer._prompt_helper)
    assert "estimate_tokens_in_messages" not in vars(helper._token_counter)
