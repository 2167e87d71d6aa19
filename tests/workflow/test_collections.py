"""Tests of a workflow that runs in other collections than its own."""

from __future__ import annotations

from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool
from teola_plugin.workflow import PER_QUERY, Branch, Condition, Indexing, Searching, Synthesis, Workflow


def test_in_collections_moves_components_of_bodies_too() -> None:
    flow = (
        Indexing("index", collection="notes")
        >> Indexing("own", collection=PER_QUERY)
        >> Condition("known", value="question")
        >> Branch("found", condition="known", then=Searching("some", collection="notes", k=1))
        >> Synthesis("answer", context="found", max_tokens=4)
    )
    plain = Workflow("notes", flow)
    moved = plain.in_collections(lambda engine, name: f"{engine}-{name}")
    places = {one.name: one.collections() for one in moved.flow.everything() if one.collections()}
    other = (("store", "store-notes"),)
    assert places == {"index": other, "own": (("store", PER_QUERY),), "some": other}
    with EnginePool.local(fake_engines()) as pool:
        given = {"question": "Yes, what?", "documents": ["Lambs eat oats."]}
        assert plain.deploy(pool).in_collections(lambda *place: "else").run(given).outputs["found"]
        assert pool.admin("store", "collections").result(10) == ["else"]
