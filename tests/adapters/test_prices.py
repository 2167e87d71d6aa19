"""Tests of `prices=`: tokens and dollars in reports and traces are those that the provider was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langgraph.graph import START, StateGraph

from benchmarks.public_apps.__main__ import APPS
from benchmarks.public_apps.apps import MODEL, App
from benchmarks.public_apps.langchain_apps import chat_model
from benchmarks.public_apps.replies import prompt_tokens
from benchmarks.public_apps.server import FakeServer, LoggedRequest, fake_server
from teola_plugin import EnginePool, Price, accelerate
from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.engines import fake_engines
from teola_plugin.errors import ConfigError, RegistrationError
from teola_plugin.langchain import ChatTeola
from teola_plugin.observe import Cost, ModelCost, emit, format_summary

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

SCALE = 0.02
PRICE = Price(input=2.0, output=10.0, cached_input=1.0)
PRICES = {MODEL: PRICE}
ASK = ChatPromptTemplate.from_template


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


def chats(server: FakeServer) -> list[LoggedRequest]:
    return [one for one in server.take_log() if one.path == "/v1/chat/completions"]


def bodies(requests: list[LoggedRequest]) -> list[str]:
    return sorted(str(one.body) for one in requests)


def cost_of(fast: Any) -> Cost:
    cost: Cost | None = fast.report().cost
    assert cost is not None
    return cost


class Counting(BaseChatModel):
    """A model that reports tokens, and fails for questions with `fail`."""

    name: str = "counting"
    model: str = "m"
    cached: int = 0
    is_silent: bool = False

    @property
    def _llm_type(self) -> str:
        return "counting"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        usage: Any = {"input_tokens": 1000, "output_tokens": 100, "total_tokens": 1100}
        usage["input_token_details"] = {"cache_read": self.cached}
        message = AIMessage("an answer", usage_metadata=None if self.is_silent else usage)
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(0)
        return self._generate(messages)


# ------------------------------------------------------------ the same as the provider says


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_cost_counts_the_tokens_of_the_requests(app: App, server: FakeServer) -> None:
    value = {"query": app.input} if app.kind == "workflow" else app.input
    original, fast = app.build(server.base_url), accelerate(app.build(server.base_url), prices=PRICES)
    entries = entries_of(original, app.name)
    server.take_log()
    asyncio.run(_answered(entries, original, value))
    expected = bodies(chats(server))

    asyncio.run(_answered(entries, fast, value))
    requests = chats(server)
    facts = cost_of(fast).facts()

    assert bodies(requests) == expected
    assert facts["queries"] == 1
    assert facts["calls"] == len(requests)
    assert facts["calls_without_tokens"] == facts["wasted_calls"] == 0
    assert facts["input_tokens"] == sum(prompt_tokens(one.body) for one in requests)
    assert facts["dollars"] == pytest.approx((facts["input_tokens"] * 2 + facts["output_tokens"] * 10) / 1e6)


async def _answered(entries: Any, obj: Any, value: Any) -> Any:
    return await entries.acall(obj, value)


def two_calls(server: FakeServer, **options: Any) -> Any:
    """Return a chain of two independent calls, of which the second is prefetched."""
    model = chat_model(server.base_url, **options)
    first = RunnablePassthrough.assign(a=ASK("A of {x}") | model)
    return first.assign(b=ASK("B of {x}") | model)


async def _streamed(fast: Any) -> None:
    async for _ in fast.astream({"x": "oats"}):
        pass


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda fast: fast.invoke({"x": "oats"}),
    "ainvoke": lambda fast: asyncio.run(fast.ainvoke({"x": "oats"})),
    "stream": lambda fast: list(fast.stream({"x": "oats"})),
    "astream": lambda fast: asyncio.run(_streamed(fast)),
    "batch": lambda fast: fast.batch([{"x": "oats"}, {"x": "ivy"}]),
    "abatch": lambda fast: asyncio.run(fast.abatch([{"x": "oats"}, {"x": "ivy"}])),
    "batch with arguments": lambda fast: fast.batch([{"x": "oats"}, {"x": "ivy"}], max_tokens=5),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_cost_counts_calls_at_every_entry_point(entry: str, server: FakeServer) -> None:
    fast = accelerate(two_calls(server, stream_usage=True), prices=PRICES)
    chats(server)

    ENTRIES[entry](fast)

    requests, cost = chats(server), cost_of(fast)
    assert cost.queries == (2 if "batch" in entry else 1)
    assert sum(row.calls for row in cost.models) == len(requests) == 2 * cost.queries
    assert sum(row.input_tokens for row in cost.models) == sum(prompt_tokens(one.body) for one in requests)
    assert not cost.wasted.models


def test_trace_of_each_batch_query_has_its_own_calls(server: FakeServer) -> None:
    fast = accelerate(two_calls(server), prices=PRICES)

    fast.batch([{"x": "oats"}, {"x": "ivy"}, {"x": "oak"}])

    trace = fast.last_trace()
    assert trace is not None
    assert trace.cost is not None
    assert trace.cost.facts()["calls"] == 2


def test_report_is_the_mean_of_the_queries(server: FakeServer) -> None:
    fast = accelerate(RunnableLambda(lambda x: [Counting().invoke("?") for _ in range(x)]), prices={"m": PRICE})

    for calls in (1, 2, 6):
        fast.invoke(calls)

    facts = cost_of(fast).facts()
    assert (facts["queries"], facts["calls"], facts["input_tokens"]) == (3, 3, 3000)
    assert "Cost of a query, the mean of the last 3" in fast.explain()


# ------------------------------------------------------------ wasted calls


def test_wasted_prefetched_call_is_counted_separately(server: FakeServer) -> None:
    """The parser between the two calls raises, so the original never makes the second one."""
    model = chat_model(server.base_url)
    first = RunnablePassthrough.assign(a=ASK("A of {x}") | model | JsonOutputParser())
    fast = accelerate(first.assign(b=ASK("B of {x}") | model), speculate="all", prices=PRICES)
    chats(server)

    with pytest.raises(Exception, match="json"):
        asyncio.run(fast.ainvoke({"x": "oats"}))

    facts, trace = cost_of(fast).facts(), fast.last_trace()
    assert len(chats(server)) == facts["calls"] == 2
    assert facts["wasted_calls"] == 1
    assert facts["wasted_dollars"] is None or facts["wasted_dollars"] > 0
    assert "wasted: " in fast.explain()
    assert trace is not None
    assert trace.cost is not None
    assert trace.cost.facts()["wasted_calls"] == 1


def test_without_prefetching_nothing_is_wasted(server: FakeServer) -> None:
    fast = accelerate(two_calls(server), speculate="off", prices=PRICES)

    fast.invoke({"x": "oats"})

    assert cost_of(fast).facts()["calls"] == 2
    assert not cost_of(fast).wasted.models


# ------------------------------------------------------------ prices


def test_model_without_a_price_is_named_and_never_costs_nothing() -> None:
    model, other = Counting(model="m"), Counting(model="other")
    chain = RunnablePassthrough.assign(a=ASK("A of {x}") | model).assign(b=ASK("B of {x}") | other)
    fast = accelerate(chain, prices={"m": PRICE})

    fast.invoke({"x": "oats"})

    cost = cost_of(fast)
    assert cost.dollars is None
    assert cost.facts()["dollars"] is None
    assert cost.unpriced == ("other",)
    lines = fast.explain().splitlines()
    assert "m  1.0 calls  1,000.0 tokens in  100.0 out  $0.003000" in lines
    assert "other  1.0 calls  1,000.0 tokens in  100.0 out  no price" in lines
    assert lines[-1] == "$0.003000 per query, without other (no price)"


def test_calls_that_report_no_tokens_have_no_dollars() -> None:
    fast = accelerate(ASK("{x}") | Counting(is_silent=True), prices={"m": PRICE})

    fast.invoke({"x": "oats"})

    assert cost_of(fast).dollars is None
    assert "m  1.0 calls  0.0 tokens in  0.0 out  (1.0 calls reported no tokens)" in fast.explain()


def test_cached_tokens_have_a_price_of_their_own() -> None:
    fast = accelerate(ASK("{x}") | Counting(cached=400), prices={"m": PRICE})

    fast.invoke({"x": "oats"})

    assert cost_of(fast).dollars == pytest.approx((600 * 2 + 400 * 1 + 100 * 10) / 1e6)
    assert "(400.0 cached)" in fast.explain()


def test_model_bound_to_the_call_decides_the_price() -> None:
    fast = accelerate(ASK("{x}") | Counting().bind(model="large"), prices={"m": PRICE, "large": Price(20, 100)})

    fast.invoke({"x": "oats"})

    assert [row.model for row in cost_of(fast).models] == ["large"]


def test_without_prices_nothing_is_counted() -> None:
    fast = accelerate(ASK("{x}") | Counting())

    fast.invoke({"x": "oats"})

    assert fast.report().cost is None
    assert "Cost" not in fast.explain()
    trace = fast.last_trace()
    assert trace is None or trace.cost is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([("m", PRICE)], "prices is a list"),
        ({"m": 0.15}, "the price of 'm' is 0.15"),
        ({"m": {"input": 1, "output": 2}}, "which is no Price"),
        ({1: PRICE}, "the key 1"),
        ({"": PRICE}, "no name of a model"),
    ],
)
def test_invalid_price_table_raises(table: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        accelerate(ASK("{x}") | Counting(), prices=table)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), "0.15", None, True])
def test_price_that_is_no_number_raises(value: Any) -> None:
    with pytest.raises(RegistrationError, match="dollars per million tokens"):
        Price(value, 1)


# ------------------------------------------------------------ graphs, and accelerated objects inside of others


def graph_of(inner: Any) -> Any:
    def ask(state: dict[str, Any]) -> dict[str, Any]:
        return {"answer": inner.invoke({"x": state["x"]}).content}

    return StateGraph(dict).add_node("ask", ask).add_edge(START, "ask").compile()


def test_calls_of_nested_accelerated_object_count_for_outer_one() -> None:
    inner = accelerate(ASK("{x}") | Counting(), prices={"m": PRICE})
    outer = accelerate(graph_of(inner), prices={"m": PRICE})

    outer.invoke({"x": "oats"})

    assert cost_of(outer).facts()["calls"] == 1
    assert inner.report().cost is None


# ------------------------------------------------------------ engines and pools


def test_engines_of_a_pool_have_prices_by_their_name() -> None:
    with EnginePool.local(fake_engines()) as pool:
        chain = ASK("{x}") | ChatTeola(pool=pool)
        fast = accelerate(chain, pool=pool, prices={"llm": PRICE})
        fast.invoke({"x": "oats"})
        trace = fast.last_trace()
        assert trace is not None

    cost = cost_of(fast)
    assert [row.model for row in cost.models] == ["llm"]
    assert cost.facts()["calls"] == 1
    assert cost.facts()["output_tokens"] > 0
    assert trace.cost == cost


YAML = """
engines:
  llm: {kind: fake, options: {of: llm}}
prices:
  m: {input: 2.0, output: 10.0, cached_input: 1.0}
"""


def test_yaml_of_a_pool_names_prices() -> None:
    config = PoolConfig.parse(YAML)
    assert config.price_table == {"m": PRICE}
    pool = EnginePool.from_yaml(config)

    with pool:
        fast = accelerate(ASK("{x}") | Counting(), pool=pool)
        other = accelerate(ASK("{x}") | Counting(), pool=pool, prices={"m": Price(20, 100)})
        fast.invoke({"x": "oats"})
        other.invoke({"x": "oats"})

    assert cost_of(fast).dollars == pytest.approx(0.003)
    assert cost_of(other).dollars == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("{input: -1, output: 2}", "greater than or equal to 0"),
        ("{input: 1}", "output: it is missing"),
        ("{input: much, output: 2}", "number"),
        ("{input: true, output: 2}", "it must be a number"),
        ("{input: .inf, output: 2}", "finite"),
        ("{input: 1, output: 2, cached: 1}", "there is no such setting"),
    ],
)
def test_bad_price_in_yaml_is_refused_with_its_line(price: str, message: str) -> None:
    with pytest.raises(ConfigError, match="line 3") as raised:
        PoolConfig.parse(f"engines: {{llm: {{kind: fake}}}}\nprices:\n  m: {price}\n")
    assert message in str(raised.value)


# ------------------------------------------------------------ traces


def test_trace_has_the_cost_of_its_query(server: FakeServer) -> None:
    fast = accelerate(two_calls(server), prices=PRICES)
    fast.invoke({"x": "oats"})
    fast.invoke({"x": "ivy"})

    trace = fast.last_trace()

    assert trace is not None
    assert trace.cost is not None
    assert trace.summary()["cost"] == trace.cost.facts()
    assert trace.summary()["cost"]["calls"] == 2
    assert f"cost        {MODEL}  2.0 calls" in format_summary(trace)


def test_opentelemetry_span_of_a_query_has_the_cost(server: FakeServer) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fast = accelerate(two_calls(server), prices=PRICES, app="notes")
    fast.invoke({"x": "oats"})
    trace = fast.last_trace()
    assert trace is not None
    assert trace.cost is not None

    emit(trace, provider)

    attributes = next(span.attributes for span in exporter.get_finished_spans() if span.name == "notes")
    facts = trace.cost.facts()
    assert attributes["teola.cost.dollars"] == facts["dollars"]
    assert attributes["teola.cost.input_tokens"] == facts["input_tokens"]
    assert attributes["teola.cost.wasted_calls"] == 0
    assert "gen_ai.usage.input_tokens" not in attributes


def test_sums_keep_wasted_rows_apart() -> None:
    rows = [
        ModelCost("m", PRICE, calls=1, input_tokens=10),
        ModelCost("m", PRICE, is_wasted=True, calls=1, input_tokens=5),
        ModelCost("m", PRICE, calls=2, input_tokens=20),
    ]

    cost = Cost.total(rows, 2)

    assert [(row.is_wasted, row.calls, row.input_tokens) for row in cost.models] == [(False, 3, 30), (True, 1, 5)]
    assert cost.facts()["wasted_dollars"] == pytest.approx(5e-6)
