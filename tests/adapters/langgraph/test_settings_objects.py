"""Tests of settings objects that nodes make from the config and the environment, as LangGraph's templates do."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

import pytest
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
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
from teola_plugin.adapters.plan_report import Reason, Status
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
WAYS = ("invoke", "ainvoke", "messages")
NOTE_PROMPT = "Take a note on {item}, in one sentence, and say nothing else at all. " * 4
T = TypeVar("T", bound="RetrievalConfiguration")

# ------------------------------------------------------------ settings of the official templates: dataclasses


@dataclass(kw_only=True)
class RetrievalConfiguration:
    """The part of the settings that other graphs share."""

    base_url: Annotated[str, {"__template_metadata__": {"kind": "url"}}] = field(
        default="", metadata={"description": "The provider."}
    )
    search_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"description": "More arguments."})
    labels: list[str] = field(default_factory=lambda: ["a", "b"])

    @classmethod
    def from_runnable_config(cls: type[T], config: RunnableConfig | None = None) -> T:
        """Create an object of the settings that the config names."""
        config = ensure_config(config)
        configurable = config.get("configurable") or {}
        _fields = {f.name for f in fields(cls) if f.init}
        return cls(**{k: v for k, v in configurable.items() if k in _fields})


@dataclass(kw_only=True)
class Configuration(RetrievalConfiguration):
    """The settings of a graph."""

    query_model: str = field(default=f"openai/{MODEL}", metadata={"description": "provider/model"})
    note_prompt: str = NOTE_PROMPT
    max_notes: int = 3


@dataclass(frozen=True)
class FrozenConfiguration:
    """Settings with a property and a method, whose fields are given one by one."""

    base_url: str
    name: str = MODEL
    note_prompt: str = NOTE_PROMPT
    max_notes: int = 3

    @property
    def query_model(self) -> str:
        """The name of the provider and of the model."""
        return f"openai/{self.name}"

    @classmethod
    def from_runnable_config(cls, config: RunnableConfig) -> FrozenConfiguration:
        """Create an object of single settings."""
        configurable = config.get("configurable", {})
        return cls(configurable["base_url"], name=configurable.get("name", MODEL))


# ------------------------------------------------------------ settings of pydantic, and of the environment


class SearchAPI(Enum):
    """Where to search."""

    NONE = "none"
    WEB = "web"


class ServerConfig(BaseModel):
    """Settings inside settings."""

    url: str | None = Field(default=None)


class PydanticConfiguration(BaseModel):
    """Settings of the kinds that public apps have."""

    base_url: str = Field(default="")
    query_model: str = Field(default=f"openai/{MODEL}", json_schema_extra={"metadata": {"type": "text"}})
    note_prompt: str = NOTE_PROMPT
    max_notes: int = Field(default=3, ge=1)
    search_api: SearchAPI = Field(default=SearchAPI.WEB)
    server: ServerConfig | None = Field(default=None)
    mode: Literal["fast", "slow"] = "fast"
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_runnable_config(cls, config: RunnableConfig | None = None) -> PydanticConfiguration:
        """Create an object of the environment and of the config."""
        configurable = config["configurable"] if config and "configurable" in config else {}
        raw_values: dict[str, Any] = {
            name: os.environ.get(name.upper(), configurable.get(name))
            for name in cls.model_fields.keys()  # noqa: SIM118
        }
        values = {k: v for k, v in raw_values.items() if v is not None}
        return cls(**values)


class NamesInAList(PydanticConfiguration):
    """Settings that are read by a list of their names."""

    @classmethod
    def from_runnable_config(cls, config: RunnableConfig | None = None) -> PydanticConfiguration:
        """Create an object of the environment and of the config."""
        configurable = config.get("configurable", {}) if config else {}
        field_names = list(cls.model_fields.keys())
        values: dict[str, Any] = {
            field_name: os.getenv(field_name.upper(), configurable.get(field_name)) for field_name in field_names
        }
        return cls(**{k: v for k, v in values.items() if v is not None})

    model_config = ConfigDict(arbitrary_types_allowed=True)


class WholeConfigurable(PydanticConfiguration):
    """Settings that take all that is configurable, and ignore what is not theirs."""

    @classmethod
    def from_runnable_config(cls, config: RunnableConfig | None = None) -> PydanticConfiguration:
        """Create an object of all that is configurable."""
        if config is None:
            return cls()
        return cls(**config["configurable"])


class FieldsOfTheModel(PydanticConfiguration):
    """Settings that are read by the fields of their class."""

    @classmethod
    def from_runnable_config(cls, config: RunnableConfig | None = None) -> PydanticConfiguration:
        """Create an object of the config."""
        configurable = {} if config is None else config["configurable"]
        return cls(**{k: v for k, v in configurable.items() if k in cls.model_fields})


def get_configuration(config: RunnableConfig) -> Configuration:
    """Return the settings, by a function of the module."""
    configurable = config.get("configurable", {})
    model = os.getenv("QUERY_MODEL", configurable.get("query_model", f"openai/{MODEL}"))
    return Configuration(base_url=configurable["base_url"], query_model=model)


Read = Callable[[RunnableConfig], Any]
READERS: dict[str, Read] = {
    "dataclass": Configuration.from_runnable_config,
    "frozen dataclass": FrozenConfiguration.from_runnable_config,
    "pydantic and environment": PydanticConfiguration.from_runnable_config,
    "names in a list": NamesInAList.from_runnable_config,
    "all that is configurable": WholeConfigurable.from_runnable_config,
    "fields of the model": FieldsOfTheModel.from_runnable_config,
    "function of the module": get_configuration,
}

# ------------------------------------------------------------ graphs


def graph_of(read: Read) -> Any:
    def take_notes(state: State, *, config: RunnableConfig) -> State:
        configuration = read(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        items = state["items"][: configuration.max_notes]
        return {"notes": [model.invoke(configuration.note_prompt.format(item=item)).text for item in items]}

    def summarize(state: State, *, config: RunnableConfig) -> State:
        configuration = read(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"second": model.invoke(f"summarize {state['topic']}").text}

    return compiled(take_notes, summarize)


def async_graph_of(read: Read) -> Any:
    async def first(state: State, config: RunnableConfig) -> State:
        configuration = read(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"first": (await model.ainvoke(f"first {state['topic']}", config)).text}

    async def second(state: State, config: RunnableConfig) -> State:
        configuration = read(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"second": (await model.ainvoke(f"second {state['topic']}", config)).text}

    return compiled(first, second)


def settings_for(stub: OpenAIStub, **more: Any) -> Settings:
    return {"config": {"configurable": {"base_url": stub.base_url, "thread_id": "1", **more}}}


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READERS)
def test_calls_of_models_chosen_by_settings_objects_are_prefetched(stub: OpenAIStub, name: str, way: str) -> None:
    read, settings = READERS[name], settings_for(stub)
    expected = requests_of(stub, graph_of(read), way, settings)
    assert expected[2] == 1

    assert becomes_concurrent(stub, accelerate(graph_of(read)), way, settings, expected)


@pytest.mark.parametrize("name", READERS)
def test_async_node_calls_with_settings_objects_are_prefetched(stub: OpenAIStub, name: str) -> None:
    read, settings = READERS[name], settings_for(stub)
    expected = requests_of(stub, async_graph_of(read), "ainvoke", settings)

    assert becomes_concurrent(stub, accelerate(async_graph_of(read)), "ainvoke", settings, expected)


def test_default_settings_prefetch_from_the_first_call_on(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_URL", stub.base_url)
    read = PydanticConfiguration.from_runnable_config
    expected = requests_of(stub, graph_of(read), "invoke", {})

    first = requests_of(stub, accelerate(graph_of(read)), "invoke", {})

    assert first[:2] == expected[:2]
    assert first[2] > 1


@pytest.mark.parametrize("name", READERS)
def test_alternating_settings_use_their_own_models(stub: OpenAIStub, name: str) -> None:
    original, graph = graph_of(READERS[name]), accelerate(graph_of(READERS[name]))

    for number in [1, 2] * 3:
        settings = settings_for(stub, query_model=f"openai/model-{number}", name=f"model-{number}", max_notes=number)
        expected = requests_of(stub, original, "invoke", settings)
        assert requests_of(stub, graph, "invoke", settings)[:2] == expected[:2]


@pytest.mark.parametrize("name", ["pydantic and environment", "names in a list", "function of the module"])
def test_changed_environment_variable_applies_to_the_next_query(
    stub: OpenAIStub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, graph = graph_of(READERS[name]), accelerate(graph_of(READERS[name]))
    settings = settings_for(stub)

    for model in ("one", "one", "two", "two", "one", "three", "two"):
        monkeypatch.setenv("QUERY_MODEL", f"openai/{model}")
        expected = requests_of(stub, original, "invoke", settings)
        assert f"'model': '{model}'" in expected[1][0]
        assert requests_of(stub, graph, "invoke", settings)[:2] == expected[:2]
    monkeypatch.delenv("QUERY_MODEL")
    expected = requests_of(stub, original, "invoke", settings)
    assert becomes_concurrent(stub, graph, "invoke", settings, expected)


def test_each_tenant_uses_its_own_api_key(stub: OpenAIStub) -> None:
    @dataclass(kw_only=True)
    class WithKey(RetrievalConfiguration):
        api_key: str = "none"

    def first(state: State, config: RunnableConfig) -> State:
        configuration = WithKey.from_runnable_config(config)
        model = load_chat_model(f"openai/{MODEL}", configuration.base_url, configuration.api_key)
        return {"first": model.invoke("a").text}

    def second(state: State, config: RunnableConfig) -> State:
        configuration = WithKey.from_runnable_config(config)
        model = load_chat_model(f"openai/{MODEL}", configuration.base_url, configuration.api_key)
        return {"second": model.invoke("b").text}

    graph = accelerate(compiled(first, second))

    for tenant in ("one", "two", "one", "two", "one"):
        stub.headers.clear()
        settings = settings_for(stub, api_key=tenant, teola_tenant=tenant)
        requests_of(stub, graph, "invoke", settings)
        assert [headers["authorization"] for headers in stub.headers] == [f"Bearer {tenant}"] * 2


def test_api_key_is_read_from_the_environment_of_the_query(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(state: State, config: RunnableConfig) -> State:
        model = ChatOpenAI(model=MODEL, base_url=config["configurable"]["base_url"])
        return {"first": model.invoke("a").text}

    def second(state: State, config: RunnableConfig) -> State:
        model = ChatOpenAI(model=MODEL, base_url=config["configurable"]["base_url"])
        return {"second": model.invoke("b").text}

    monkeypatch.setenv("OPENAI_API_KEY", "one")
    graph = accelerate(compiled(first, second))

    for key in ("one", "one", "two", "two", "one", "two"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        stub.headers.clear()
        requests_of(stub, graph, "invoke", settings_for(stub))
        time.sleep(0.1)
        assert [headers["authorization"] for headers in stub.headers] == [f"Bearer {key}"] * 2


class Credentials(BaseModel):
    """Credentials in a global, as objects of pydantic-settings are."""

    api_key: SecretStr = SecretStr("one")


credentials = Credentials()


def test_api_key_in_a_global_is_read_for_each_query(stub: OpenAIStub) -> None:
    def first(state: State, config: RunnableConfig) -> State:
        model = ChatOpenAI(model=MODEL, base_url=config["configurable"]["base_url"], api_key=credentials.api_key)
        return {"first": model.invoke("a").text}

    def second(state: State, config: RunnableConfig) -> State:
        model = ChatOpenAI(model=MODEL, base_url=config["configurable"]["base_url"], api_key=credentials.api_key)
        return {"second": model.invoke("b").text}

    graph, most_at_once = accelerate(compiled(first, second)), 0
    for key in ("one", "one", "one", "two", "two", "one"):
        credentials.api_key = SecretStr(key)
        stub.headers.clear()
        most_at_once = max(most_at_once, requests_of(stub, graph, "invoke", settings_for(stub))[2])
        time.sleep(0.1)
        assert [headers["authorization"] for headers in stub.headers] == [f"Bearer {key}"] * 2

    assert most_at_once == 2


# ------------------------------------------------------------ what stays in its place


@dataclass(kw_only=True)
class WithPostInit(RetrievalConfiguration):
    """Settings whose class runs code of its own when an object is made."""

    made: Any = None
    query_model: str = f"openai/{MODEL}"
    note_prompt: str = NOTE_PROMPT
    max_notes: int = 3

    def __post_init__(self) -> None:
        """Count the objects."""
        self.note_prompt = f"{next(counter)} {self.note_prompt}"


class WithValidator(PydanticConfiguration):
    """Settings with a validator."""

    @field_validator("note_prompt")
    @classmethod
    def count(cls, value: str) -> str:
        """Count the objects."""
        return f"{next(counter)} {value}"


class WithCounter(PydanticConfiguration):
    """Settings with a factory that gives another value each time."""

    note_prompt: str = Field(default_factory=lambda: f"{next(counter)} {NOTE_PROMPT}")


class WithPostInitOfPydantic(PydanticConfiguration):
    """Settings of pydantic that are changed after their validation."""

    def model_post_init(self, context: Any, /) -> None:
        """Count the objects."""
        self.note_prompt = f"{next(counter)} {self.note_prompt}"


class WithInit(PydanticConfiguration):
    """Settings with a constructor of their own."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{**values, "note_prompt": f"{next(counter)} {NOTE_PROMPT}"})


@dataclass(kw_only=True)
class WithFactory(RetrievalConfiguration):
    """Settings with a factory that gives another value each time."""

    query_model: str = f"openai/{MODEL}"
    note_prompt: str = field(default_factory=lambda: f"{next(counter)} {NOTE_PROMPT}")
    max_notes: int = 3


counter = itertools.count()


def read_after_change(config: RunnableConfig) -> PydanticConfiguration:
    """Return settings of an environment that the function changes."""
    os.environ["NOTE_PROMPT"] = "changed " + config["configurable"]["thread_id"] + NOTE_PROMPT
    return PydanticConfiguration.from_runnable_config(config)


def read_after_update(config: RunnableConfig) -> PydanticConfiguration:
    """Return settings of an environment that the function updates."""
    os.environ.update(NOTE_PROMPT="updated " + config["configurable"]["thread_id"] + NOTE_PROMPT)
    return PydanticConfiguration.from_runnable_config(config)


IN_PLACE: dict[str, Read] = {
    "post-init": WithPostInit.from_runnable_config,
    "validator": WithValidator.from_runnable_config,
    "constructor": WithInit.from_runnable_config,
    "post-init of pydantic": WithPostInitOfPydantic.from_runnable_config,
    "factory": WithFactory.from_runnable_config,
    "factory of pydantic": WithCounter.from_runnable_config,
    "changed environment": read_after_change,
    "updated environment": read_after_update,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_settings_with_custom_code_keep_the_originals_requests(
    stub: OpenAIStub, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    global counter
    monkeypatch.setenv("NOTE_PROMPT", NOTE_PROMPT)
    monkeypatch.delenv("NOTE_PROMPT")
    original, graph = graph_of(IN_PLACE[name]), accelerate(graph_of(IN_PLACE[name]))

    for thread in ("1", "2", "3"):
        counter = itertools.count()
        expected = requests_of(stub, original, way, settings_for(stub, thread_id=thread))
        counter = itertools.count()
        result = requests_of(stub, graph, way, settings_for(stub, thread_id=thread))
        assert result[:2] == expected[:2]


def test_settings_that_cannot_be_created_raise_the_originals_error(stub: OpenAIStub) -> None:
    def read(config: RunnableConfig) -> Configuration:
        return Configuration(**{k: v for k, v in config["configurable"].items() if k != "note"})

    original, graph = graph_of(read), accelerate(graph_of(read))
    errors = []
    stub.requests.clear()

    for one in (original, graph, graph):
        with pytest.raises(TypeError) as caught:
            one.invoke({"topic": "oats", "items": ["a"]}, **settings_for(stub))
        errors.append(str(caught.value))

    assert errors == errors[:1] * 3
    assert stub.requests == []


def test_invalid_settings_raise_the_originals_error(stub: OpenAIStub) -> None:
    original = graph_of(PydanticConfiguration.from_runnable_config)
    graph = accelerate(graph_of(PydanticConfiguration.from_runnable_config))
    settings = settings_for(stub, max_notes="many")
    errors = []
    stub.requests.clear()

    for one in (original, graph, graph):
        with pytest.raises(ValueError, match="max_notes") as caught:
            one.invoke({"topic": "oats", "items": ["a"]}, **settings)
        errors.append(str(caught.value))

    assert errors == errors[:1] * 3
    assert stub.requests == []


def test_settings_object_changed_by_a_node_keeps_the_originals_requests(stub: OpenAIStub) -> None:
    def first(state: State, config: RunnableConfig) -> State:
        configuration = Configuration.from_runnable_config(config)
        configuration.note_prompt = "other"
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"first": model.invoke(configuration.note_prompt).text}

    def second(state: State, config: RunnableConfig) -> State:
        configuration = Configuration.from_runnable_config(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"second": model.invoke(configuration.note_prompt).text}

    settings = settings_for(stub)
    expected = requests_of(stub, compiled(first, second), "invoke", settings)
    graph = accelerate(compiled(first, second))

    for _ in range(4):
        assert requests_of(stub, graph, "invoke", settings)[:2] == expected[:2]


def test_settings_object_formatted_into_a_prompt_keeps_the_requests(stub: OpenAIStub) -> None:
    def first(state: State, config: RunnableConfig) -> State:
        configuration = Configuration.from_runnable_config(config)
        model = load_chat_model(configuration.query_model, configuration.base_url)
        return {"notes": [model.invoke(f"{configuration} {item}").text for item in state["items"]]}

    settings = settings_for(stub)
    expected = requests_of(stub, compiled(first), "invoke", settings)
    graph = accelerate(compiled(first))

    for _ in range(4):
        assert requests_of(stub, graph, "invoke", settings)[:2] == expected[:2]


# ------------------------------------------------------------ what the report says


def test_report_names_calls_of_default_settings(stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_URL", stub.base_url)

    report = accelerate(graph_of(PydanticConfiguration.from_runnable_config)).report()

    assert [row.status for row in report.calls] == [Status.PREFETCHED] * 2
    assert [row.start.partition(";")[0] for row in report.calls] == [
        "all items at once, when its node begins",
        "when take_notes begins",
    ]
    assert all(row.start.endswith("with other settings from their second call on") for row in report.calls)


def test_report_names_query_from_which_calls_are_prefetched(stub: OpenAIStub) -> None:
    graph, settings = accelerate(graph_of(get_configuration)), settings_for(stub)
    before = graph.report()

    expected = requests_of(stub, graph_of(get_configuration), "invoke", settings)
    assert becomes_concurrent(stub, graph, "invoke", settings, expected)
    after = graph.report()

    assert [row.reason for row in before.calls] == [Reason.MODEL_OF_SETTINGS] * 2
    assert "from the second call with the same settings on" in before.calls[0].remark
    assert [row.status for row in after.calls] == [Status.PREFETCHED] * 2
    assert "hits" in after.calls[0].remark


def test_report_forgets_the_settings_of_a_tenant(stub: OpenAIStub) -> None:
    settings = settings_for(stub)
    with EnginePool.local(llm=FakeLLM()) as pool:
        graph = accelerate(graph_of(get_configuration), pool=pool)
        requests_of(stub, graph, "invoke", settings)
        before = graph.report()

        pool.forget("default")

        assert [row.status for row in before.calls] == [Status.PREFETCHED] * 2
        assert [row.reason for row in graph.report().calls] == [Reason.MODEL_OF_SETTINGS] * 2


def test_report_lists_calls_of_settings_with_validators_as_not_prefetched(stub: OpenAIStub) -> None:
    report = accelerate(graph_of(WithValidator.from_runnable_config)).report()

    assert [row.status for row in report.calls] == [Status.IN_PLACE] * 2


# ------------------------------------------------------------ settings that are read in each round of a loop


def loop_of(read: Read, change: Callable[[str], None] | None = None) -> Any:
    """Return a graph that reads its settings for each item. `change`: runs at the end of each round."""

    def model_of(config: RunnableConfig) -> Any:
        configuration = read(config)
        return load_chat_model(configuration.query_model, configuration.base_url)

    def take_notes(state: State, *, config: RunnableConfig) -> State:
        notes = []
        for item in state["items"]:
            notes.append(model_of(config).invoke(f"note {item}").text)
            if change is not None:
                change(item)
        return {"notes": notes}

    return compiled(take_notes)


@pytest.mark.parametrize("way", ["invoke", "messages"])
@pytest.mark.parametrize("name", READERS)
def test_calls_of_a_loop_that_reads_settings_are_prefetched(stub: OpenAIStub, name: str, way: str) -> None:
    read, settings = READERS[name], settings_for(stub)
    expected = requests_of(stub, loop_of(read), way, settings)
    assert expected[2] == 1

    assert becomes_concurrent(stub, accelerate(loop_of(read)), way, settings, expected)


def set_model(item: str) -> None:
    exec(f"import os; os.environ['QUERY_MODEL'] = 'openai/model of {item}'")


def assign_model(item: str) -> None:
    os.environ["QUERY_MODEL"] = f"openai/model of {item}"


@pytest.mark.parametrize("change", [set_model, assign_model])
@pytest.mark.parametrize("name", ["pydantic and environment", "names in a list", "function of the module"])
def test_environment_that_changes_from_round_to_round_is_read_in_each(
    stub: OpenAIStub, name: str, change: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, settings = READERS[name], settings_for(stub)
    results = []
    for graph in (loop_of(read, change), accelerate(loop_of(read, change))):
        for _ in range(2):
            monkeypatch.setenv("QUERY_MODEL", f"openai/{MODEL}")
            results.append(requests_of(stub, graph, "invoke", settings)[:2])

    assert results[2:] == results[:2]
