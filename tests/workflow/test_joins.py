"""Tests of `>>`: order, parallel lists, joins of several flows, and what cannot be joined."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from teola_plugin import EnginePool
from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import GraphError
from teola_plugin.workflow import Branch, Flow, Function, Generation, Indexing, Loop, Map, Searching, Workflow


def step(name: str, *reads: str) -> Function:
    """Return a component that reads the values of these names."""
    words = ", ".join(reads)
    return Function(name, eval(f"lambda {words}: ({words}{',' if reads else ''})"), pure=True)


def order(flow: Flow) -> set[str]:
    return {f"{first}{second}" for first, second in flow.order}


A, B, C, D = (step(name) for name in "abcd")


def test_join_orders_components_in_sequence() -> None:
    flow = A >> B >> C
    assert [one.name for one in flow] == ["a", "b", "c"]
    assert order(flow) == {"ab", "bc"} and flow.heads == ("a",) and flow.tails == ("c",)


def test_joining_of_components_is_associative() -> None:
    one, other = A >> (B >> C), (A >> B) >> C
    assert one.components == other.components and order(one) == order(other)


def test_components_of_a_list_are_unordered() -> None:
    assert order(A >> [B, C] >> D) == {"ab", "ac", "bd", "cd"}
    assert order([A, B] >> C) == {"ac", "bc"}
    assert order([A >> B, C] >> D) == {"ab", "bd", "cd"}


def test_component_in_two_flows_appears_once() -> None:
    flow = Flow.of([A >> B, A >> C]) >> D
    assert [one.name for one in flow] == ["a", "b", "c", "d"]
    assert order(flow) == {"ab", "ac", "bd", "cd"}


def test_joining_two_components_of_one_name_raises_graph_error() -> None:
    with pytest.raises(GraphError, match="two components share the name 'a'"):
        A >> Searching("a")


@pytest.mark.parametrize("what", [None, "b", len, 7])
def test_joining_a_non_component_raises_graph_error(what: Any) -> None:
    with pytest.raises(GraphError, match="cannot be joined by >>") as error:
        A >> what
    assert "Function('name', function)" in error.value.hint


@pytest.mark.parametrize("name", ["", "two words", "a.b", "a/b", "outputs", "items", 7, None])
def test_invalid_component_name_raises_graph_error(name: Any) -> None:
    with pytest.raises(GraphError, match="component name"):
        Function(name, len)


def test_circular_joins_raise_graph_error_with_a_hint() -> None:
    with pytest.raises(GraphError, match="wait for each other in a circle: ") as error:
        Workflow("w", [A >> B, B >> A], output="a")
    assert "Loop" in error.value.hint


def test_circle_of_reads_and_joins_raises_graph_error() -> None:
    with pytest.raises(GraphError, match=r"a >> b >> a|b >> a >> b"):
        Workflow("w", step("a", "b") >> step("b"), output="b")


def test_flow_with_two_ends_needs_an_output() -> None:
    with pytest.raises(GraphError, match=r"ends in 2 components \(b, c\)"):
        Workflow("w", A >> [B, C])
    assert Workflow("w", A >> [B, C], output="c").output == "c"


def test_unknown_output_raises_graph_error() -> None:
    with pytest.raises(GraphError, match="output names 'x', which is no component"):
        Workflow("w", A >> B, output="x")


def test_duplicate_name_in_a_body_raises_graph_error() -> None:
    with pytest.raises(GraphError, match="2 components share the name 'b'"):
        Workflow("w", A >> B >> Map("m", over="a", flow=step("b")))


def test_parallel_read_and_write_raise_graph_error() -> None:
    index, found = Indexing("index"), Searching("found")
    with pytest.raises(GraphError, match="index writes collection:store/documents and found reads it") as error:
        Workflow("w", [index, found], output="found")
    assert error.value.hint == "join them: index >> found"
    for flow in (index >> found, found >> index, [index, Searching("found", collection="others")]):
        assert Workflow("w", flow, output="found")


def written_and_searched() -> Flow:
    return Indexing("rows") >> Searching("found")


@pytest.mark.parametrize(
    "holder",
    [
        lambda: Branch("way", condition="question", then=written_and_searched()),
        lambda: Branch("way", condition="question", then=Searching("other"), otherwise=written_and_searched()),
        lambda: Loop("way", init="question", flow=written_and_searched() >> Generation("said", "{draft} {found}")),
    ],
)
def test_body_may_search_what_it_wrote_before(holder: Callable[[], Any]) -> None:
    assert [one.name for one in Workflow("w", holder()).inputs] == ["question", "documents"]


def test_parallel_read_and_write_in_a_body_raise_graph_error() -> None:
    flow = [Indexing("rows"), Searching("found")] >> Generation("said", "{found}")
    with pytest.raises(GraphError, match=r"rows writes .* and found reads it.*rows >> found"):
        Workflow("w", Branch("way", condition="question", then=flow))
    each = Indexing("rows", documents="item") >> Searching("found")
    with pytest.raises(GraphError, match=r"items of way write .* side by side"):
        Workflow("w", Map("way", over="texts", flow=each))


def test_input_of_another_kind_raises_graph_error() -> None:
    with pytest.raises(
        GraphError, match="found: query reads 'a', which is passages that were found; expected"
    ) as error:
        Workflow("w", Searching("a") >> Searching("found", query="a"))
    assert "Function" in error.value.hint


def test_workflow_package_imports_no_framework() -> None:
    code = "import sys, teola_plugin.workflow; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"langchain_core", "llama_index", "langgraph", "pydantic", "numpy", "torch", "ray", "vllm", "psycopg"}
    assert "teola_plugin.workflow" in names and heavy.isdisjoint(names)


def test_value_without_a_producer_is_an_input() -> None:
    workflow = Workflow("w", step("a", "x", "y") >> Generation("b", "{a} {z}"))
    assert [one.name for one in workflow.inputs] == ["x", "y", "z"]


def test_reading_a_body_value_outside_raises_graph_error() -> None:
    flow = step("a") >> Map("m", over="a", flow=step("b", "item")) >> step("c", "b")
    with pytest.raises(GraphError, match="'b' is read outside of the component that holds it"):
        Workflow("w", flow)


def test_body_may_read_the_inputs_of_its_holder() -> None:
    workflow = Workflow("w", step("a", "x") >> Map("m", over="a", flow=step("b", "item", "y")))
    assert [one.name for one in workflow.inputs] == ["x", "y"]


def test_components_and_inputs_may_have_any_name() -> None:
    names = ("call", "name", "scope", "suffix", "function")
    ends = Function("end", eval(f"lambda {', '.join(names)}: [{', '.join(names)}]"), pure=True)
    firsts = [Function(name, eval(f"lambda question: question + ' {name}'"), pure=True) for name in names]
    workflow = Workflow("any", Flow.of(firsts) >> ends)
    with EnginePool.local(fake_engines()) as pool:
        assert workflow.deploy(pool).run({"question": "x"}).answer == [f"x {name}" for name in names]
