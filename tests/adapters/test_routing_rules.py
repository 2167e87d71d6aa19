"""Tests of routing rules, which decide the engine that does the work of an object."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from teola_plugin.adapters.routing import (
    EngineRoute,
    RoutingRules,
    ServerModel,
    WorkerTable,
    arouted_items,
    current_rules,
    route_of,
    routed_items,
    under_routing,
)

POOL: Any = object()
LLM, OTHER = EngineRoute(POOL, "llm"), EngineRoute(POOL, "other")


class Model:
    def __init__(self, name: str = "m") -> None:
        self.name = name


class Special(Model):
    pass


def test_rule_for_an_object_applies_to_that_object_only() -> None:
    model = Model()
    rules = RoutingRules([(model, LLM)])

    assert rules.route(model) == LLM
    assert rules.route(Model()) is None


def test_rule_for_a_class_applies_to_subclasses() -> None:
    rules = RoutingRules(classes={Model: LLM})

    assert rules.route(Special()) == LLM
    assert rules.route(object()) is None


def test_rule_for_a_server_applies_to_objects_created_later() -> None:
    def route(address: ServerModel) -> EngineRoute | None:
        return LLM if address.model == "m" else None

    rules = RoutingRules(servers=route, server_model_of=lambda obj: ServerModel("http://here/v1", obj.name))

    assert rules.route(Model("m")) == LLM
    assert rules.route(Model("n")) is None


def test_object_derived_from_a_routed_one_has_its_route() -> None:
    original, copy = Model(), Model()
    rules = RoutingRules([(original, LLM)])

    rules.derive(copy, original)

    assert rules.route(copy) == LLM


def test_rules_hold_inside_their_context_only() -> None:
    model = Model()

    with under_routing(RoutingRules([(model, LLM)])):
        inside = route_of(model)

    assert inside == LLM
    assert route_of(model) is None


def test_empty_inner_rules_keep_the_outer_rules() -> None:
    model = Model()

    with under_routing(RoutingRules([(model, LLM)])), under_routing(None), under_routing(RoutingRules()):
        assert route_of(model) == LLM


def test_route_attribute_of_a_class_overrides_rules() -> None:
    class Bound(Model):
        __teola_route__ = OTHER

    class Worker(Model):
        __teola_route__ = False

    with under_routing(RoutingRules(classes={Model: LLM})):
        assert route_of(Bound()) == OTHER
        assert route_of(Worker()) is None


def test_rules_do_not_leak_between_items_of_an_iterator() -> None:
    model, rules = Model(), None
    rules = RoutingRules([(model, LLM)])

    def items() -> Iterator[Any]:
        for _ in range(2):
            yield route_of(model)

    routes = []
    for route in routed_items(rules, items()):
        routes.append(route)
        assert current_rules.get() is None
    assert routes == [LLM, LLM]


async def test_rules_do_not_leak_between_items_of_an_async_iterator() -> None:
    model = Model()

    async def items() -> Any:
        for _ in range(2):
            yield route_of(model)

    routes = []
    async for route in arouted_items(RoutingRules([(model, LLM)]), items()):
        routes.append(route)
        assert current_rules.get() is None
    assert routes == [LLM, LLM]


def made_workers() -> tuple[WorkerTable, list[str]]:
    names: list[str] = []

    def make(obj: Model, route: EngineRoute) -> Any:
        names.append(obj.name)
        name = obj.name
        return f"worker of {name}", lambda one: one.name == name

    return WorkerTable(make), names


def test_worker_is_created_once_per_field_values() -> None:
    table, names = made_workers()
    model = Model()

    assert table.worker(model, LLM) == table.worker(model, LLM) == "worker of m"
    model.name = "n"
    assert table.worker(model, LLM) == "worker of n"

    assert names == ["m", "n"]


def test_workers_keep_no_routed_object_alive() -> None:
    table, _ = made_workers()
    model = Model()
    table.worker(model, LLM)

    del model
    gc.collect()

    assert not table._entries._entries


@pytest.mark.parametrize("slots", [(), ("__weakref__",)])
def test_objects_without_weak_references_get_workers(slots: tuple[str, ...]) -> None:
    slotted: Any = type("Slotted", (), {"__slots__": ("name", *slots)})
    table, names = made_workers()
    one = slotted()
    one.name = "s"

    assert table.worker(one, LLM) == table.worker(one, LLM) == "worker of s"
    assert len(names) == (1 if slots else 2)
