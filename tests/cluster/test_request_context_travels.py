"""Tests that tenant, urgency and collection versions travel with requests to their host and back."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosts import Cluster, Host, result

from teola_plugin.cluster.wire import Parcel, RequestEvent, Submit
from teola_plugin.engines.fake import FakeEmbedder, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.errors import EngineError
from teola_plugin.graph import Attributes, Primitive, PrimitiveKind, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Done, EmbedText, Request, Result, SearchVector, Version
from teola_plugin.runtime.ports.port import Follow
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.scheduling.live_query import Objective

K = PrimitiveKind
EMBED = Primitive("embed", K.EMBEDDING, "embedder", named(texts=Ref("$input")))
SEARCH = Primitive(
    "search", K.SEARCHING, "store", named(vectors=Ref("embed")), attributes=Attributes(collection="c", k=2)
)
FIELDS: dict[str, Any] = {"depth": 3, "app": "search", "weight": 2.5, "session": "s", "objective": Objective.THROUGHPUT}


def event(primitive: Primitive, **fields: Any) -> Enqueue:
    return Enqueue(0.0, "q", primitive.id, primitive.kind, (), **{**FIELDS, "gang": "g", **fields})


def request(name: str = "r1") -> Request:
    return Request(name, K.EMBEDDING, EmbedText("x"), "q", "acme")


def context_at(host: Host) -> tuple[str, dict[str, Any]]:
    """Return tenant and request context of the last request; sessions and gangs as the client named them."""
    request, context = host.requests[-1]
    found = {name: getattr(context, name) for name in (*FIELDS, "gang")}
    return request.tenant, {**found, **{name: found[name].partition("|")[2] for name in ("session", "gang")}}


def never() -> FakeEmbedder:
    return FakeEmbedder("embedder", faults=Faults(hang_on=lambda _: True))


async def test_request_context_reaches_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(FakeEmbedder())
        await result(cluster.send(await cluster.port("embedder"), request(), event(EMBED)))
        assert context_at(host) == ("acme", {**FIELDS, "gang": "g"})


async def test_request_context_of_a_follower_reaches_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(monkeypatch) as cluster:
        store = cluster.host(FakeStore())
        cluster.host(FakeEmbedder())
        await cluster.port("store")
        port = await cluster.port("embedder")
        follow = Follow(SEARCH, "q-ahead1", {}, (("vectors", ()),), event(SEARCH, depth=1, gang="h"), "acme")
        await result(cluster.send(port, request(), event(EMBED), primitive=EMBED, followers=(follow,)))
        await cluster.until(lambda: bool(store.requests))
        assert context_at(store) == ("acme", {**FIELDS, "depth": 1, "gang": "h"})


async def test_adopted_follower_gets_its_changed_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers are announced with the primitive before them.

    Their host gets the change when the graph reaches them.
    """
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(never())
        port = await cluster.port("embedder")
        later = replace(EMBED, id="later")
        port.expect("q-ahead1", event(later, depth=1, gang=""))
        cluster.send(port, request(), event(EMBED))  # fills the engine
        port._link.send(Submit(event(later, depth=1, gang=""), (request("q-ahead1.0"),)))  # as its other host does
        await cluster.until(lambda: len(host.requests) == 2)
        listener = cluster.create_request(port, request("q-ahead1.0"), event(later))
        port.adopt("q-ahead1", [listener.entry], event(later, depth=9))
        [queued] = host.port.scheduler.queue
        await cluster.until(lambda: queued.depth == 9)
        assert queued.gang.endswith("|g")


async def test_new_host_gets_the_changed_request_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is sent again as it stands now, not as it stood when it was asked."""
    async with Cluster(monkeypatch) as cluster:
        first = cluster.host(never())
        port = await cluster.port("embedder")
        listener = cluster.send(port, request(), event(EMBED, gang="", objective=Objective.LATENCY))
        port.depths(DepthChanged(0.0, "q", {"embed": 7}, {"embed": (Objective.THROUGHPUT, "late")}))
        await cluster.until(lambda: bool(first.requests))
        second = cluster.host(FakeEmbedder())
        await result(listener)
        assert context_at(second) == ("acme", {**FIELDS, "depth": 7, "gang": "late"})


async def test_request_without_gang_stays_without_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all of a client's calls would wait for each other."""
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(never())
        port = await cluster.port("embedder")
        for name in ("one", "two"):  # the second one waits: the first fills the engine
            cluster.send(port, request(name), event(replace(EMBED, id=name)))
        port.depths(DepthChanged(0.0, "q", {}, dict.fromkeys(("one", "two"), (Objective.LATENCY, ""))))
        await cluster.until(lambda: len(host.requests) == 2)
        queue = host.port.scheduler.queue
        await cluster.until(lambda: bool(queue) and queue[-1].objective is Objective.LATENCY)
        assert queue[-1].gang == ""


async def test_resent_request_is_separate_from_its_cancelled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was given up greets and asks again, under the same name, while its old request is cancelled."""
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(FakeEmbedder(faults=Faults(hang_on=lambda r: r.id == "me#1|r1")))
        listener = cluster.send(await cluster.port("embedder"), request(), event(EMBED))
        await cluster.until(lambda: bool(host.requests))
        await host.leave("me")
        assert len(await result(listener)) == 32
        assert [sent.id for sent, _ in host.requests] == ["me#1|r1", "me#2|r1"]


class Choosy(FakeEmbedder):
    """Cannot even say how large some requests are: this raises where a host queues them."""

    def size(self, request: Request) -> float:
        return len(request.payload.text.encode())


async def test_request_that_a_host_cannot_queue_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(Choosy())
        port = await cluster.port("embedder")
        bad = replace(request("bad"), payload=EmbedText("\ud800"))
        failed, beside = cluster.send(port, bad, event(EMBED)), cluster.send(port, request("beside"), event(EMBED))
        with pytest.raises(EngineError, match="surrogate"):
            await result(failed)
        assert await result(beside)
        assert await result(cluster.send(port, request("after"), event(EMBED)))
        assert not next(iter(host.clients)).entries


class Unsendable(FakeEmbedder):
    """Answers some requests with what cannot be pickled."""

    def _value(self, request: Request) -> Any:
        return (lambda: 0) if request.payload.text == "odd" else super()._value(request)


async def test_unserializable_answer_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(monkeypatch) as cluster:
        cluster.host(Unsendable())
        port = await cluster.port("embedder")
        odd = cluster.send(port, replace(request("odd"), payload=EmbedText("odd")), event(EMBED))
        beside = cluster.send(port, request("beside"), event(EMBED))
        with pytest.raises(EngineError, match="cannot be sent"):
            await result(odd)
        assert await result(beside)


class ForeignHost(Host):
    """A host whose values belong to a module that cannot be imported afterwards."""

    def _pack_events(self, number: int, messages: Sequence[RequestEvent]) -> Parcel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "only_there", SimpleNamespace(Foreign=Foreign))  # type: ignore[arg-type]
            return super()._pack_events(number, messages)


class Foreign(dict[str, int]):
    __module__ = "only_there"


class OfForeigners(FakeEmbedder):
    def _value(self, request: Request) -> Any:
        return [Foreign(a=1)] if request.payload.text == "odd" else super()._value(request)


async def test_unreadable_answer_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client used to treat its host as lost, reconnect and send the request again, for ever."""
    async with Cluster(monkeypatch) as cluster:
        host = cluster.host(OfForeigners(), ForeignHost)
        port = await cluster.port("embedder")
        odd = cluster.send(port, replace(request("odd"), payload=EmbedText("odd")), event(EMBED))
        beside = cluster.send(port, request("beside"), event(EMBED))
        with pytest.raises(EngineError, match="Foreign cannot be imported"):
            await result(odd)
        assert await result(beside) and len(host.requests) == 2


class Versioned(FakeStore):
    """Says which version of the collection each search saw."""

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        async for found in super().execute(batch):
            yield replace(found, version=Version("c", 7)) if isinstance(found, Done) else found


async def test_version_of_a_search_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(monkeypatch) as cluster:
        cluster.host(Versioned())
        port = await cluster.port("store")
        search = Request("r1", K.SEARCHING, SearchVector("c", [1.0], 2), "q")
        listener = cluster.send(port, search, event(SEARCH))
        assert not await result(listener) and listener.entry.search.version == Version("c", 7)


def test_version_of_a_collection_can_be_queried(shared: EnginePool) -> None:
    from teola_plugin.requests.payloads import Chunk, IngestRow

    before = shared.admin("store", "version", "versioned").result(30)
    shared.call(K.INGESTION, "store", [IngestRow("versioned", Chunk("a", "x"), [1.0])]).result(30)
    after = shared.admin("store", "version", "versioned").result(30)
    assert before != after == shared.admin("store", "version", "versioned").result(30)
    shared.admin("store", "delete_collection", "versioned").result(30)
