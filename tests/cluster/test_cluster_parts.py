"""Tests of the parts of the shared pool that need no Ray: scaling, streams by time, clients, followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from teola_plugin.cluster.coalescing import coalesced
from teola_plugin.cluster.config import Autoscale
from teola_plugin.cluster.host import clients
from teola_plugin.cluster.host.clients import Client, Outbox
from teola_plugin.cluster.host.followers import Followers, follower_order
from teola_plugin.cluster.host.scaling import QueueDepth
from teola_plugin.cluster.names import actor_name, directory_name, pool_of
from teola_plugin.cluster.remote_values import RayBatch, RayValue, remote_values_in, store_large
from teola_plugin.cluster.wire import (
    RequestEnded,
    RequestPiece,
    RequestStarted,
    Submit,
    pack,
    pack_orders,
    unpack,
    unpack_orders,
)
from teola_plugin.errors import EngineError, EngineUnavailable, RequestTooLarge
from teola_plugin.graph import Attributes, Primitive, PrimitiveKind, Ref, named
from teola_plugin.requests.payloads import Chunk, Done, EmbedText, IngestRow, Piece, Request, Result, SearchVector
from teola_plugin.runtime.ports.port import Follow, follower_of, follower_request
from teola_plugin.scheduling.engine_queue import Enqueue

K = PrimitiveKind
RULE = Autoscale(min_replicas=1, max_replicas=3, queued_per_replica=4, up_after_s=2, down_after_s=10)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ([(0, 5, 1), (1, 5, 1)], [1, 1]),  # not for long enough
        ([(0, 5, 1), (2, 5, 1)], [1, 2]),
        ([(0, 5, 1), (1, 4, 1), (2, 5, 1)], [1, 1, 1]),  # it was short in between
        ([(0, 9, 2), (2, 9, 2), (3, 99, 3), (9, 99, 3)], [2, 3, 3, 3]),  # no more than most
        ([(0, 0, 2), (9, 0, 2), (10, 0, 2)], [2, 2, 1]),
        ([(0, 0, 2), (9, 1, 2), (10, 0, 2)], [2, 2, 2]),
        ([(0, 0, 1), (99, 0, 1)], [1, 1]),  # no fewer than least
        ([(0, 0, 5)], [3]),
    ],
)
def test_autoscaling_policy_follows_the_queue(seen: Sequence[tuple[float, int, int]], wanted: list[int]) -> None:
    rule = QueueDepth(RULE)
    assert [rule.target(at, queued, replicas) for at, queued, replicas in seen] == wanted


async def test_first_pieces_and_ends_are_sent_at_once() -> None:
    async def results() -> AsyncIterator[Result]:
        for n in range(4):
            yield Piece("a", f"{n}")
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        yield Piece("b", "x")
        yield Done("a", "0123")
        yield Done("b", "x")

    parcels = [parcel async for parcel in coalesced(results(), 0.01)]
    flat = [result for parcel in parcels for result in parcel]
    assert "".join(r.text for r in flat if isinstance(r, Piece) and r.request_id == "a") == "0123"
    assert [r.request_id for r in flat if isinstance(r, Done)] == ["a", "b"]
    assert parcels[0][0] == Piece("a", "0") or parcels[0][0].text.startswith("0")  # type: ignore[union-attr]
    assert sum(isinstance(r, Piece) and r.request_id == "a" for r in flat) < 4  # some were put together


async def test_exception_of_an_engine_ends_the_stream() -> None:
    async def results() -> AsyncIterator[Result]:
        yield Piece("a", "x")
        raise EngineUnavailable("gone", retryable=True)

    found = []
    with pytest.raises(EngineUnavailable, match="gone"):
        async for parcel in coalesced(results(), 0.01):
            found += parcel
    assert found == [Piece("a", "x")]


async def test_parcels_out_of_order_are_reordered() -> None:
    client = Client("c")
    assert list(client.in_order(2, b"two")) == []
    assert list(client.in_order(3, b"three")) == []
    assert list(client.in_order(1, b"one")) == [b"one", b"two", b"three"]
    assert list(client.in_order(4, b"four")) == [b"four"]


async def test_failing_reader_does_not_block_later_parcels() -> None:
    client, read = Client("c"), []
    for number in (1, 2):
        try:
            for ready in client.in_order(number, number):
                read.append(ready)
                raise ValueError
        except ValueError:
            pass
    assert read == [1, 2]


async def test_events_are_read_in_order_with_pieces_joined() -> None:
    client = Client("c")
    for news in (
        RequestStarted("r", "0", 1),
        RequestPiece("r", Piece("r", "a")),
        RequestPiece("r", Piece("r", "b")),
        RequestEnded("r", "ab"),
    ):
        client.send_event(news)
    client.close()
    assert await client.outbox.take() == (
        1,
        [RequestStarted("r", "0", 1), RequestPiece("r", Piece("r", "ab", 2)), RequestEnded("r", "ab")],
    )
    assert await client.outbox.take() is None


async def test_concurrent_takers_are_served_in_turn() -> None:
    outbox = Outbox()
    takers = [asyncio.ensure_future(outbox.take()) for _ in range(3)]
    for name in "ab":
        outbox.put(RequestEnded(name, name))
        await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
        takers = sorted(takers, key=asyncio.Future.done)
        assert takers.pop().result() == ("ab".index(name) + 1, [RequestEnded(name, name)])
    outbox.close()
    assert await takers[0] is None


async def test_pending_pieces_of_a_stream_are_merged() -> None:
    """Each of two streams without a reader keeps one text, whatever comes between."""
    outbox = Outbox()
    for n in range(1000):
        for name in "ab":
            outbox.put(RequestPiece(name, Piece(name, f"{n} ")))
    outbox.put(RequestEnded("a", "x"))
    assert len(outbox) == 3
    taken = await outbox.take()
    assert taken is not None
    text = "".join(f"{n} " for n in range(1000))
    assert taken[1] == [RequestPiece(name, Piece(name, text, 1000)) for name in "ab"] + [RequestEnded("a", "x")]


async def test_client_that_fetches_no_events_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_EVENTS", 9)
    client = Client("c")
    for n in range(9):
        client.send_event(RequestEnded(f"r{n}", n))
    assert not client.is_lost(60.0) and client.is_lost(-1.0)
    client.send_event(RequestEnded("r9", 9))
    assert client.is_lost(60.0)


@pytest.mark.parametrize(
    "error",
    [
        EngineError("x", engine="e", replica="1", hint="h"),
        RequestTooLarge("y"),
        EngineUnavailable("z", retryable=True),
    ],
)
def test_errors_survive_serialization(error: EngineError) -> None:
    [ended] = unpack(pack([RequestEnded("r", None, error)]))
    assert type(ended.error) is type(error) and ended.error.__dict__ == error.__dict__
    assert str(ended.error) == str(error)


# ---------------------------------------------------------------- values that stay


def test_ray_references_are_sent_separately_from_the_bytes() -> None:
    held = RayBatch("a reference of Ray's")
    requests = [Request(f"r{n}", K.INGESTION, IngestRow("c", Chunk("x", "t"), RayValue(held, n))) for n in range(2)]  # type: ignore[arg-type]
    parcel = pack(requests)
    assert isinstance(parcel, tuple) and parcel[1] == ["a reference of Ray's"]
    one, two = (remote_values_in(request.payload)[0] for request in unpack(parcel))
    assert one.batch is two.batch and one.batch.ref == "a reference of Ray's" and (one.index, two.index) == (0, 1)
    [(names, order)] = unpack_orders(pack_orders([Submit(event(SEARCH), tuple(requests))], lambda *_: None) or b"")
    assert names == ("r0", "r1") and remote_values_in(order.requests[1].payload)[0].index == 1  # type: ignore[union-attr]


def test_unserializable_order_fails_alone() -> None:
    failed: list[Any] = []
    bad, good = (
        Submit(event(EMBED), (Request(name, K.EMBEDDING, payload),)) for name, payload in (("b", lambda: 0), ("g", 1))
    )
    [(names, _)] = unpack_orders(pack_orders([bad, good], lambda order, _: failed.append(order)) or b"")
    assert names == ("g",) and failed == [bad]
    assert pack_orders([bad], lambda *_: None) is None


def test_small_and_shared_values_are_sent_inline() -> None:
    small: list[Result] = [Done("a", [1.0] * 9), Done("b", "x" * 99_999)]
    assert store_large(small, {"a"}) is small


# ---------------------------------------------------------------- followers

EMBED = Primitive("embed", K.EMBEDDING, "embedder", named(texts=Ref("$input")))
SEARCH = Primitive(
    "search", K.SEARCHING, "store", named(vectors=Ref("embed")), attributes=Attributes(collection="c", k=2)
)


def event(primitive: Primitive) -> Enqueue:
    return Enqueue(0.0, "q", primitive.id, primitive.kind, ())


def follow(then: tuple[Follow, ...] = ()) -> Follow:
    return Follow(SEARCH, "q-ahead1", {}, (("vectors", ()),), event(SEARCH), "", then)


def order(then: tuple[Follow, ...]) -> Submit:
    return Submit(event(EMBED), (Request("r1", K.EMBEDDING, EmbedText("x")),), EMBED, then)


class Taken:
    def __init__(self) -> None:
        self.here: list[Submit] = []
        self.elsewhere: list[tuple[str, Submit]] = []
        self.followers = Followers(
            "embedder",
            lambda _, order: self.here.append(order),
            lambda _, engine, o: self.elsewhere.append((engine, o)),
        )


def test_follower_request_is_built_from_the_value_before_it() -> None:
    made = follower_order(follow(), [0.5, 1.0])
    assert made is not None
    assert made.requests == (Request("q-ahead1.0", K.SEARCHING, SearchVector("c", [0.5, 1.0], 2), "q", ""),)
    assert follower_order(Follow(SEARCH, "n", {}, (("vectors", ("no",)),), event(SEARCH), ""), [1.0]) is None


def test_follower_is_sent_to_its_engine_when_its_value_is_ready() -> None:
    taken = Taken()
    taken.followers.expect("me", order((follow(),)))
    taken.followers.end_request("other", "r1", [9.0], None)
    assert not taken.elsewhere
    taken.followers.end_request("me", "r1", [1.0], None)
    [(engine, sent)] = taken.elsewhere
    assert engine == "store" and sent.requests[0].payload == SearchVector("c", [1.0], 2)


@pytest.mark.parametrize("how", ["failed", "cancelled", "unwanted", "left"])
def test_no_follower_is_sent_after_failure_or_cancellation(how: str) -> None:
    taken = Taken()
    taken.followers.expect("me", order((follow(),)))
    if how == "failed":
        taken.followers.end_request("me", "r1", None, EngineError("x"))
    elif how == "cancelled":
        taken.followers.cancel("me", ["r1"])
    elif how == "unwanted":
        taken.followers.cancel("me", ["q-ahead1", "q-ahead1.0"])
    else:
        taken.followers.forget("me")
    taken.followers.end_request("me", "r1", [1.0], None)
    assert not taken.here and not taken.elsewhere


def test_follower_is_sent_with_its_own_followers() -> None:
    taken, again = Taken(), Primitive("more", K.EMBEDDING, "embedder", named(texts=Ref("$input")), after=("search",))
    last: Any = Follow(again, "q-ahead2", {"texts": "t"}, (), event(again), "")
    taken.followers.expect("me", order((follow((last,)),)))
    taken.followers.end_request("me", "r1", [1.0], None)
    assert taken.elsewhere[0][1].then == (last,) and taken.elsewhere[0][1].primitive == SEARCH


# ---------------------------------------------------------------- names


def test_actor_names_contain_their_pool() -> None:
    assert [pool_of(name) for name in (actor_name("farm", "llm"), directory_name("farm"))] == ["farm", "farm"]
    assert [pool_of(name) for name in ("", "teola", "other/farm", "teolas/farm/llm")] == ["", "", "", ""]


def test_follower_name_is_recovered_from_its_request_id() -> None:
    assert follower_of(follower_request("q1-ahead2", 3)) == "q1-ahead2" and follower_of("q1-3") == ""
