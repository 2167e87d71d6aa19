"""Tests of models that the config or the context of a call chooses: later calls with equal settings are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_openai import ChatOpenAI
from langgraph.config import get_config
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime, get_runtime
from pydantic import BaseModel
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.settings_graphs import (
    Settings,
    State,
    answers,
    becomes_concurrent,
    compiled,
    load_chat_model,
    requests_of,
)

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


class DictContext(TypedDict, total=False):
    """A context that is a dictionary."""

    model: str
    url: str


@dataclass
class Context:
    """A context with attributes."""

    url: str
    model: str = MODEL


class PydanticContext(BaseModel):
    """A context with attributes, of pydantic."""

    url: str
    model: str = MODEL


Build = Callable[[], Any]


# ------------------------------------------------------------ graphs


def key_of_the_config() -> Any:
    def first(state: State, config: RunnableConfig) -> State:
        model = load_chat_model(config["configurable"]["model"], config["configurable"]["url"])
        return {"first": model.invoke(f"first {state['topic']}").text}

    def second(state: State, config: RunnableConfig) -> State:
        configurable = config.get("configurable", {})
        model = load_chat_model(configurable.get("model", "none/none"), configurable.get("url"))
        return {"second": model.invoke(f"second {state['topic']}", config).text}

    return compiled(first, second)


def loop_over_items() -> Any:
    def take_notes(state: State, config: RunnableConfig) -> State:
        configurable = ensure_config(config)["configurable"]
        model = ChatOpenAI(model=MODEL, base_url=configurable["url"], api_key="k")
        return {"notes": [model.invoke(f"note {item}", config).text for item in state["items"]]}

    return compiled(take_notes)


def config_of_the_running_node() -> Any:
    def first(state: State) -> State:
        model = load_chat_model(get_config()["configurable"]["model"], get_config()["configurable"]["url"])
        return {"first": model.invoke(f"first {state['topic']}").text}

    def second(state: State) -> State:
        configurable = ensure_config()["configurable"]
        model = load_chat_model(configurable["model"], configurable["url"])
        return {"second": model.invoke(f"second {state['topic']}").text}

    return compiled(first, second)


def context_with_attributes(schema: Any = Context) -> Any:
    def first(state: State, runtime: Runtime[Context]) -> State:
        model = load_chat_model(f"openai/{runtime.context.model}", runtime.context.url)
        return {"first": model.invoke(f"first {state['topic']}").text}

    def second(state: State) -> State:
        context = get_runtime(Context).context
        model = ChatOpenAI(model=context.model, base_url=context.url, api_key="k")  # type: ignore[arg-type]
        return {"second": model.invoke(f"second {state['topic']}").text}

    return compiled(first, second, context=schema)


def dictionary_as_context() -> Any:
    def take_notes(state: State, runtime: Runtime[DictContext]) -> State:
        model = load_chat_model(f"openai/{runtime.context['model']}", runtime.context["url"])
        return {"notes": [model.invoke(f"note {item}").text for item in state["items"]]}

    return compiled(take_notes, context=DictContext)


class Note(BaseModel):
    """A note."""

    text: str


def configurable_model() -> Any:
    chosen = init_chat_model(configurable_fields=("model", "model_provider", "base_url", "api_key"))

    def first(state: State, config: RunnableConfig) -> State:
        configurable = config["configurable"]
        settings = {"model": MODEL, "model_provider": "openai", "base_url": configurable["url"], "api_key": "k"}
        structured = chosen.with_structured_output(Note).with_retry(stop_after_attempt=2).with_config(settings)
        return {"first": structured.invoke(f"json {state['topic']}").text}  # type: ignore[union-attr]

    def second(state: State, config: RunnableConfig) -> State:
        settings = {"model_provider": "openai", "base_url": config["configurable"]["url"], "api_key": "k"}
        model = chosen.with_config({"configurable": settings})
        return {"notes": [model.invoke(f"note {item}").text for item in state["items"]]}

    return compiled(first, second)


def model_of_the_ambient_config() -> Any:
    names, options = ("model", "base_url"), {"model_provider": "openai", "api_key": "k"}
    chosen = init_chat_model("none", configurable_fields=names, config_prefix="my", **options)

    def first(state: State) -> State:
        return {"first": chosen.invoke(f"first {state['topic']}").text}

    def second(state: State, config: RunnableConfig) -> State:
        return {"notes": [chosen.invoke(f"note {item}", config).text for item in state["items"]]}

    return compiled(first, second)


def configurable_of(url: str) -> Settings:
    settings = {"model": f"openai/{MODEL}", "url": url, "thread_id": "1"}
    return {"config": {"configurable": settings}}


BUILDS: dict[str, tuple[Build, Callable[[str], Settings]]] = {
    "key of the config": (key_of_the_config, configurable_of),
    "loop over items": (loop_over_items, configurable_of),
    "config of the running node": (config_of_the_running_node, configurable_of),
    "dataclass as context": (context_with_attributes, lambda url: {"context": Context(url)}),
    "pydantic model as context": (
        lambda: context_with_attributes(PydanticContext),
        lambda url: {"context": PydanticContext(url=url)},
    ),
    "dictionary as context": (dictionary_as_context, lambda url: {"context": {"model": MODEL, "url": url}}),
    "configurable model": (
        configurable_model,
        lambda url: {"config": {"configurable": {"model": MODEL, "url": url}}},
    ),
    "model of the ambient config": (
        model_of_the_ambient_config,
        lambda url: {"config": {"configurable": {"my_model": MODEL, "my_base_url": url}}},
    ),
}

# ------------------------------------------------------------ calls


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "messages"])
@pytest.mark.parametrize("name", BUILDS)
def test_calls_of_a_model_chosen_by_settings_are_prefetched(stub: OpenAIStub, name: str, way: str) -> None:
    build, settings_for = BUILDS[name]
    settings = settings_for(stub.base_url)
    expected = requests_of(stub, build(), way, settings)
    assert expected[2] == 1

    assert becomes_concurrent(stub, accelerate(build()), way, settings, expected)


def test_each_call_uses_the_model_of_its_settings(stub: OpenAIStub) -> None:
    graph, plain = accelerate(key_of_the_config()), key_of_the_config()
    models = [f"openai/model-{number}" for number in range(20)]

    for name in [*models, *models]:
        settings = {"config": {"configurable": {"model": name, "url": stub.base_url}}}
        expected = requests_of(stub, plain, "invoke", settings)
        assert requests_of(stub, graph, "invoke", settings)[:2] == expected[:2]


def test_requests_use_the_api_key_of_their_call(stub: OpenAIStub) -> None:
    def first(state: State, config: RunnableConfig) -> State:
        configurable = config["configurable"]
        return {"first": load_chat_model(f"openai/{MODEL}", configurable["url"], configurable["key"]).invoke("a").text}

    def second(state: State, config: RunnableConfig) -> State:
        configurable = config["configurable"]
        return {"second": load_chat_model(f"openai/{MODEL}", configurable["url"], configurable["key"]).invoke("b").text}

    graph = accelerate(compiled(first, second))

    for key in ("one", "two", "one", "two"):
        stub.headers.clear()
        settings = {"config": {"configurable": {"key": key, "url": stub.base_url}}}
        requests_of(stub, graph, "invoke", settings)
        assert [headers["authorization"] for headers in stub.headers] == [f"Bearer {key}"] * 2


def test_settings_bound_to_a_graph_prefetch_from_first_call_on(stub: OpenAIStub) -> None:
    config: Any = {"configurable": {"model": f"openai/{MODEL}", "url": stub.base_url}}
    graph = key_of_the_config().with_config(config)
    expected = requests_of(stub, graph, "invoke", {})

    assert any(requests_of(stub, accelerate(graph), "invoke", {})[2] > 1 for _ in range(5))
    assert requests_of(stub, accelerate(graph), "invoke", {})[:2] == expected[:2]


def test_graph_as_a_node_inherits_the_outer_settings(stub: OpenAIStub) -> None:
    def build() -> Any:
        builder = StateGraph(State)
        builder.add_node("inner", key_of_the_config())
        builder.add_edge(START, "inner")
        return builder.compile()

    settings = configurable_of(stub.base_url)
    expected = requests_of(stub, build(), "invoke", settings)

    assert becomes_concurrent(stub, accelerate(build()), "invoke", settings, expected)


def test_default_of_a_config_argument_is_not_used_for_prompts(stub: OpenAIStub) -> None:
    def build() -> Any:
        model = ChatOpenAI(model=MODEL, base_url=stub.base_url, api_key="k")  # type: ignore[arg-type]

        def note(state: State, config: Any = None) -> State:
            return {"notes": [model.invoke(f"{'no' if config is None else 'a'} config, {i}").text for i in "ab"]}

        note.__annotations__.clear()
        return compiled(note)

    expected = requests_of(stub, build(), "invoke", {})

    assert requests_of(stub, accelerate(build()), "invoke", {})[:2] == expected[:2]


def test_forgetting_a_tenant_drops_plans_of_its_settings(stub: OpenAIStub) -> None:
    settings = configurable_of(stub.base_url)
    expected = requests_of(stub, key_of_the_config(), "invoke", settings)
    with EnginePool.local(llm=FakeLLM()) as pool:
        graph = accelerate(key_of_the_config(), pool=pool)
        assert becomes_concurrent(stub, graph, "invoke", settings, expected)

        pool.forget("default")

        assert requests_of(stub, graph, "invoke", settings)[2] == 1
        assert becomes_concurrent(stub, graph, "invoke", settings, expected)
