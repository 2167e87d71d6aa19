"""Tests of functions that get their models from caches, properties and helpers: their certain calls are prefetched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property, lru_cache
from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_openai import ChatOpenAI
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

GetModel = Callable[[], Any]
LATENCY_S = 0.1


answers = SlowAnswers(LATENCY_S)


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


def create_model(url: str, temperature: float = 0.0) -> Any:
    return ChatOpenAI(base_url=url, api_key="k", model=MODEL, temperature=temperature, max_retries=0)  # type: ignore[arg-type]


def bodies(stub: OpenAIStub) -> list[str]:
    return sorted(json.dumps(body, sort_keys=True) for body in stub.generations)


def outcome(stub: OpenAIStub, app: Any, value: Any = "oats") -> tuple[Any, list[str], int]:
    """Return the result or error of a call, the bodies that the server got, and how many it answered at once."""
    stub.requests.clear()
    answers.most_at_once = 0
    try:
        result = app.invoke(value)
    except Exception as error:
        result = repr(error)
    time.sleep(0.03)
    return result, bodies(stub), answers.most_at_once


def two_calls(get_model: GetModel) -> Runnable[Any, Any]:
    def compare(topic: str) -> Any:
        return [get_model().invoke(f"{kind} {topic}").content for kind in ("pros", "cons")]

    return RunnableLambda(compare)


# ------------------------------------------------------------ ways to get a model


def limited_cache(url: str) -> GetModel:
    @lru_cache
    def get_model() -> Any:
        return create_model(url)

    return get_model


def cache_by_arguments(url: str) -> GetModel:
    @cache
    def get_model(base_url: str, *, temperature: float = 0.0) -> Any:
        return create_model(base_url, temperature)

    return lambda: get_model(url, temperature=0.5)


def limited_cache_by_arguments(url: str) -> GetModel:
    @lru_cache(maxsize=4)
    def get_model(base_url: str, temperature: float = 0.0) -> Any:
        return create_model(base_url, temperature)

    return lambda: get_model(url, 0.25)


class Service:
    """Makes a model when it is needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model: Any = None
        self._ready = create_model(url)

    @property
    def model(self) -> Any:
        return self._ready

    @cached_property
    def cached(self) -> Any:
        return create_model(self._url)

    @property
    def lazy(self) -> Any:
        if self._model is None:
            self._model = create_model(self._url)
        return self._model

    @lru_cache  # noqa: B019
    def get(self) -> Any:
        return create_model(self._url)


def closure(url: str) -> GetModel:
    model = None

    def get_model() -> Any:
        nonlocal model
        if model is None:
            model = create_model(url)
        return model

    return get_model


_model: Any = None
_url = ""


def _get_global() -> Any:
    global _model
    if _model is None:
        _model = create_model(_url)
    return _model


def lazy_global(url: str) -> GetModel:
    global _model, _url
    _model, _url = None, url
    return _get_global


def layers(url: str) -> GetModel:
    model = create_model(url)

    def first() -> Any:
        return model

    def second() -> Any:
        return first()

    def third() -> Any:
        return second()

    def fourth() -> Any:
        return third()

    return lambda: fourth()


WAYS: dict[str, Callable[[str], GetModel]] = {
    "lru_cache": limited_cache,
    "cache by arguments": cache_by_arguments,
    "lru_cache by arguments": limited_cache_by_arguments,
    "lru_cache of a method": lambda url: Service(url).get,
    "property": lambda url: partial_property(Service(url), "model"),
    "cached_property": lambda url: partial_property(Service(url), "cached"),
    "property that creates it": lambda url: partial_property(Service(url), "lazy"),
    "closure": closure,
    "global": lazy_global,
    "helpers in layers": layers,
}


def partial_property(service: Service, name: str) -> GetModel:
    getters: dict[str, GetModel] = {
        "model": lambda: service.model,
        "cached": lambda: service.cached,
        "lazy": lambda: service.lazy,
    }
    return getters[name]


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_a_model_from_a_helper_overlap(stub: OpenAIStub, way: str) -> None:
    expected = outcome(stub, two_calls(WAYS[way](stub.base_url)))
    fast = accelerate(two_calls(WAYS[way](stub.base_url)))

    results = [outcome(stub, fast) for _ in range(3)]

    assert [result[:2] for result in results] == [expected[:2]] * 3
    assert expected[2] == 1
    assert [result[2] for result in results] == [2, 2, 2]


@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_model_from_a_helper_is_the_originals(way: str) -> None:
    url = "http://127.0.0.1:9/v1"

    with pytest.raises(Exception, match="Connection error") as expected:
        two_calls(WAYS[way](url)).invoke("oats")
    with pytest.raises(Exception, match="Connection error") as raised:
        accelerate(two_calls(WAYS[way](url))).invoke("oats")

    assert raised.type is expected.type


# ------------------------------------------------------------ what is not certain


def cached_answers(url: str) -> Runnable[Any, Any]:
    model = create_model(url)

    @lru_cache
    def ask(question: str) -> str:
        return str(model.invoke(question).content)

    def answer(topic: str) -> Any:
        return [ask("define oats"), model.invoke(f"sum up {topic}").content]

    return RunnableLambda(answer)


def test_request_whose_answer_is_cached_is_not_repeated(stub: OpenAIStub) -> None:
    plain, fast = cached_answers(stub.base_url), accelerate(cached_answers(stub.base_url))
    for _ in range(3):
        expected = outcome(stub, plain)
        result = outcome(stub, fast)
        assert result[:2] == expected[:2]


def test_model_in_the_cache_is_used_after_its_settings_have_changed(stub: OpenAIStub) -> None:
    def build() -> tuple[Runnable[Any, Any], dict[str, float], Any]:
        settings = {"temperature": 0.0}

        @lru_cache
        def get_model() -> Any:
            return create_model(stub.base_url, settings["temperature"])

        return two_calls(get_model), settings, get_model

    plain, plain_settings, plain_getter = build()
    app, settings, getter = build()
    fast = accelerate(app)
    for temperature in (0.0, 0.5):
        plain_settings["temperature"] = settings["temperature"] = temperature
        expected = outcome(stub, plain)
        assert outcome(stub, fast)[:2] == expected[:2]
    plain_getter().temperature = getter().temperature = 0.75
    assert outcome(stub, fast)[:2] == outcome(stub, plain)[:2]
    plain_getter.cache_clear()
    getter.cache_clear()
    assert outcome(stub, fast)[:2] == outcome(stub, plain)[:2]


def test_planning_counts_no_hits_in_the_cache(stub: OpenAIStub) -> None:
    def counts(wrap: Callable[[Any], Any]) -> Any:
        @lru_cache
        def get_model() -> Any:
            return create_model(stub.base_url)

        app = wrap(two_calls(get_model))
        app.invoke("oats")
        app.invoke("rye")
        return get_model.cache_info()

    assert counts(accelerate) == counts(lambda app: app)


_mode = "brief"


def set_mode(mode: str) -> None:
    global _mode
    _mode = mode


def test_global_that_a_helper_assigns_is_read_as_assigned(stub: OpenAIStub) -> None:
    model = create_model(stub.base_url)

    def answer(topic: str) -> Any:
        first = model.invoke(f"plan {topic}").content
        set_mode("long")
        second = model.invoke(f"{_mode} answer on {topic}").content
        set_mode("brief")
        return [first, second, model.invoke(f"{_mode} title of {topic}").content]

    app = RunnableLambda(answer)
    expected = outcome(stub, app)
    fast = accelerate(app)

    assert [outcome(stub, fast)[:2] for _ in range(3)] == [expected[:2]] * 3


def test_global_that_one_branch_assigns_is_unknown_behind_it(stub: OpenAIStub) -> None:
    model = create_model(stub.base_url)

    def answer(topic: str) -> Any:
        set_mode("brief")
        if model.invoke(f"is {topic} food?").content.endswith("oats food?"):
            set_mode("long")
        return model.invoke(f"{_mode} answer on {topic}").content

    app = RunnableLambda(answer)
    expected = [outcome(stub, app, topic) for topic in ("oats", "steel")]
    fast = accelerate(app)

    assert [outcome(stub, fast, topic)[:2] for topic in ("oats", "steel")] == [one[:2] for one in expected]


class Counting:
    """Has a property that tells how often it was read."""

    def __init__(self) -> None:
        self._reads = 0

    @property
    def label(self) -> str:
        self._reads += 1
        return f"call {self._reads}"


def test_property_that_counts_is_not_read_ahead(stub: OpenAIStub) -> None:
    model = create_model(stub.base_url)

    def build() -> Runnable[Any, Any]:
        counting = Counting()
        return RunnableLambda(lambda topic: [model.invoke(f"{counting.label}: {topic}").content for _ in range(2)])

    plain, fast = build(), accelerate(build())

    for _ in range(2):
        assert outcome(stub, fast)[:2] == outcome(stub, plain)[:2]


def test_recursive_function_is_read_to_a_limited_depth(stub: OpenAIStub) -> None:
    model = create_model(stub.base_url)

    def count_down(number: int) -> list[Any]:
        if number == 0:
            return []
        return [model.invoke(f"number {number}").content, *count_down(number - 1)]

    app = RunnableLambda(lambda topic: count_down(6))
    expected = outcome(stub, app)

    result = outcome(stub, accelerate(app))

    assert result[:2] == expected[:2]
    assert result[2] > 1
