"""The page of one query: what happened to it, who shared its batches, its answer and sources where they are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from teola_plugin.graph import Batching
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.server.live_queries import LiveQuery
from teola_plugin.server.queries.records import WAITING, Record
from teola_plugin.server.service import Service

MOST = 50
"""Rows of a table, sources of an answer."""


def sections(service: Service, query: LiveQuery, trace: QueryTrace, records: Sequence[Record]) -> list[tuple[str, str]]:
    """What stands beside its trace. `records`: the submitted queries that were run as part of it; what direct requests
    asked and got is not kept. On the server's loop."""
    others = ("Other queries", '<p><a href="/">All queries</a></p>')
    return [*answers(records), *mates(service, query, trace), others]


def answers(records: Iterable[Record]) -> Iterable[tuple[str, str]]:
    """Of submitted queries, with their sources; of one that waits for somebody, what it asks."""
    for record in records:
        if record.status == WAITING:
            yield f"{record.id} waits", _questions(record)
        if record.answer is not None:
            yield f"Answer of {record.id}", _pre(str(record.answer.get("text", "")))
            sources = record.answer.get("sources")
            if isinstance(sources, Sequence) and sources and not isinstance(sources, str):
                yield (
                    "Sources",
                    "".join(
                        f"<details><summary>{n}</summary>{_pre(_text(one))}</details>"
                        for n, one in enumerate(sources[:MOST], 1)
                    ),
                )
        elif record.error is not None:
            yield f"Error of {record.id}", _pre(str(record.error.get("message", "")))


def _questions(record: Record) -> str:
    asked = (record.waiting or {}).get("interrupts") or ()
    told = (
        "".join(_pre(_plain(one.get("value"))) for one in asked[:MOST]) or "<p>It only waits to be told to go on.</p>"
    )
    return f'{told}<p><a href="/#query/{quote(record.id)}">Answer it</a></p>'


def mates(service: Service, query: LiveQuery, trace: QueryTrace) -> Iterable[tuple[str, str]]:
    """Who was in its batches: queries of its tenant by their ids; of others, nothing is told. What runs at an LLM at
    the same time is one batch, whenever it came."""
    own = service.live.by_trace(query.tenant)
    continuous = [n for n, profile in service.pool.profiles.items() if profile.batching is Batching.CONTINUOUS]
    rows = []
    for shared in service.traces.shared(trace, continuous):
        found = dict.fromkeys(own[id] for id in shared.others if id in own and own[id] is not query)
        if found:
            names = ", ".join(f"{one.id} ({one.app})" for one in list(found)[:MOST])
            rows.append((shared.engine, ", ".join(shared.primitives), names))
    if rows:
        yield "Batch-mates", _table(("engine", "of this query", "in the same batch"), rows[:MOST])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _text(source: Any) -> str:
    if isinstance(source, Mapping) and isinstance(source.get("text"), str):
        return str(source["text"])
    return _plain(source)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
