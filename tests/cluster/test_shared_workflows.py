"""Tests of workflows on a shared pool: the results of one process, many at once, streamed, nothing left behind."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.sample_workflows import GIVEN, advanced_rag

from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import QueryTimeout
from teola_plugin.pool import EnginePool
from teola_plugin.workflow import Function, Generation, Workflow


@pytest.mark.parametrize("mode", ["refine", "compact", "tree"])
def test_workflow_on_shared_pool_equals_local_pool(shared: EnginePool, mode: str) -> None:
    workflow, settings = advanced_rag(), {"mode": mode}
    with EnginePool.local(fake_engines()) as local:
        here = workflow.deploy(local).run(GIVEN, settings)
    there = workflow.deploy(shared).run(GIVEN, settings, tenant="t", deadline_s=30)
    assert there.outputs == here.outputs and there.sources == here.sources
    assert there.trace is not None and there.trace.outcome == "done"
    assert workflow.deploy(shared, passes=()).run(GIVEN, settings).outputs == here.outputs


async def test_concurrent_queries_keep_their_documents(shared: EnginePool) -> None:
    app = advanced_rag("many").deploy(shared)
    given = [{**GIVEN, "documents": f"Barn {i} is full of oats and hay."} for i in range(12)]
    results = await asyncio.gather(*(app.arun(one) for one in given))
    assert [result.sources[0].text for result in results] == [one["documents"] for one in given]


def test_closing_deletes_uploads_of_queries(fakes_address: str, shared: EnginePool) -> None:
    before = shared.admin("store", "collections").result(10)
    with EnginePool.connect(fakes_address, pool="fakes") as pool:
        advanced_rag("closed").deploy(pool).run(GIVEN)
    assert shared.admin("store", "collections").result(10) == before


def test_streamed_workflow_equals_its_result(shared: EnginePool) -> None:
    app = advanced_rag("streamed").deploy(shared)
    stream = app.stream(GIVEN)
    pieces = list(stream)
    assert "".join(pieces) == stream.result().answer == app.run(GIVEN).answer


def test_workflow_past_its_deadline_raises(shared: EnginePool) -> None:
    slow = Function("slow", lambda x: time.sleep(x)) >> Generation("a", "{slow}")
    with pytest.raises(QueryTimeout):
        Workflow("late", slow).deploy(shared).run({"x": 0.5}, deadline_s=0.05)
