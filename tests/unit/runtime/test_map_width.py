"""Tests of the overhead of a MAP: it is linear in the number of items."""

from __future__ import annotations

import asyncio
from typing import Any

from teola_plugin import EnginePool
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeStore
from teola_plugin.graph import Attributes, Effect, Fragment, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.runtime.virtual_time import run_virtual
from tests.support.steps import growth

K = PrimitiveKind


def graph() -> Graph:
    docs = (Effect("collection:docs"),)
    attributes = Attributes(collection="docs", k=2)
    each = Graph(
        [Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$item")), size=1),
         Primitive("s", K.SEARCHING, "store", named(vectors=Ref("e")), size=1, effects=docs, attributes=attributes),
         Primitive("d", K.CALL, inputs=named(hits=Ref("s")), call="d")], Ref("d"))  # fmt: skip
    return Graph(
        [Primitive("list", K.CALL, inputs=named(x=Ref("$input")), call="list"),
         Primitive("m", K.MAP, inputs=named(items=Ref("list")), fragment=Fragment(each, Ref("d"))),
         Primitive("out", K.CALL, inputs=named(x=Ref("m")), call="out")], Ref("out"))  # fmt: skip


CALLS: dict[str, Any] = {"list": lambda x: x, "out": lambda x: len(x), "d": lambda hits: len(hits)}


async def searched(width: int) -> Any:
    machine = profiles.noop()
    engines = [FakeEmbedder("embedder", machine["embedder"]), FakeStore("store", machine["store"])]
    async with EnginePool.on_this_loop(engines) as pool:
        run = pool.runtime.submit(Query({"input": [f"text {i}" for i in range(width)]}), graph(), CALLS)
        made = await asyncio.wrap_future(run.output)
        trace = await asyncio.wrap_future(run.trace)
    assert trace is not None
    assert len(trace.spans) + trace.left_out == 3 * width + 3
    return made


def test_map_over_2000_items_completes() -> None:
    assert run_virtual(searched(2000)) == 2000


def test_map_cost_is_linear_in_list_length() -> None:
    assert growth(lambda n: run_virtual(searched(n)), 40) < 1.1
