"""Tests of the ids that passes and schedulers create: written and parsed in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from teola_plugin.graph import Fragment, Graph, InstancePath, Primitive, PrimitiveKind, Ref, named
from teola_plugin.graph import instance_path as the_one_place

PACKAGE = Path(the_one_place.__file__).parents[1]
CUTS = {"split", "rsplit", "partition", "rpartition", "find", "index", "startswith", "removeprefix"}


def test_path_names_children_instances_and_stages() -> None:
    here = InstancePath("found")
    made = [here.child("hits"), here.instance(2), here.instance(2, is_second=True), here.arm(True), here.arm(False)]
    assert made == ["found/hits", "found[2]", "found[2']", "found.then", "found.else"]
    made = [here.stage(1), here.partial(0), here.grown(3), here.verify()]
    assert made == ["found#1", "found.partial#0", "found.grown#3", "found.verify"]


def test_enclosing_lists_all_outer_paths() -> None:
    deep = InstancePath("part1/found[0]/inner[3]/hits#1")
    assert list(deep.enclosing()) == ["part1", "part1/found[0]", "part1/found[0]/inner[3]"]
    assert list(InstancePath("hits").enclosing()) == []
    assert deep.outermost == "part1" and InstancePath("hits").outermost == "hits"


def test_inside_returns_the_name_relative_to_an_instance() -> None:
    deep = InstancePath("found[1]/inner[0]/hits")
    assert deep.inside("found[1]") == "inner[0]/hits" and deep.inside("found[1]/inner[0]") == "hits"
    assert deep.inside("found") is None and deep.inside("found[1]/inn") is None and deep.inside(deep.text) is None


@pytest.mark.parametrize("text", ["found[0]", "found[10]/hits", "found[0']/hits"])
def test_in_instance_of_matches_only_its_holder(text: str) -> None:
    assert InstancePath(text).in_instance_of("found")
    assert not InstancePath(text).in_instance_of("foun") and not InstancePath(f"x/{text}").in_instance_of("found")


def test_ungrown_returns_the_name_before_growth() -> None:
    assert InstancePath(InstancePath("a/answer.prefilling").grown(12)).ungrown == "a/answer.prefilling"
    assert InstancePath("a.partial#0").ungrown == "a.partial#0"


def test_fragment_instances_use_instance_path_names() -> None:
    p = Primitive("vector", PrimitiveKind.EMBEDDING, "embedder", named(texts=Ref("$item")))
    name = InstancePath("found").instance(1)
    [made], output = Fragment(Graph([p], Ref("vector")), Ref("vector")).instantiate(name, {"$item": Ref("list")})
    assert made.id == output.producer == "found[1]/vector" and InstancePath(made.id).inside(name) == "vector"


def test_no_other_module_parses_primitive_ids() -> None:
    cut = []
    for folder in ("graph", "passes", "scheduling", "runtime"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            calls = (one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call))
            for call in calls if path != Path(the_one_place.__file__) else ():
                at = call.args[0] if call.args and isinstance(call.func, ast.Attribute) else None
                marks = isinstance(at, ast.Constant) and isinstance(at.value, str) and set(at.value) & set("/#[")
                if marks and isinstance(call.func, ast.Attribute) and call.func.attr in CUTS:
                    cut.append(f"{path.relative_to(PACKAGE)}:{call.lineno}")
    assert not cut


def test_items_returns_the_item_indices_of_a_path() -> None:
    assert InstancePath("found[2]/found.retrieve.embedding").items == "[2]"
    assert InstancePath("part1/rows[0]/more[11']/rows.model.prefilling.partial#0").items == "[0][11']"
    assert InstancePath("rows#1").items == InstancePath("part1/answer.prefilling").items == ""
