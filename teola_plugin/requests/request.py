"""What an engine is asked for: one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import PrimitiveKind


@dataclass(frozen=True, slots=True)
class Request:
    """One unit of work of a primitive."""

    id: str
    """Unique within the process."""
    kind: PrimitiveKind
    payload: Any
    """See `payloads`."""
    query: str = ""
    tenant: str = ""
    priority: int = 0
    """Admission sequence number of the engine scheduler, lower is more urgent; later by a lag in a gang."""
    stream: bool = False
    """Whether somebody reads the pieces; without a reader an engine may send only the first one, and the end. A reader
    that comes late is announced: see `engines.base.listen`."""
    background: bool = False
    """Work that must not delay others on the instance (a warm-up beside deeper decodings)."""
    keep_remote: bool = False
    """Whether only engines read its value: a shared pool may leave it where it is made, if it is large."""
    depth: int = 0
    """Of its primitive, when it was admitted: the longest way to the output of its query."""
    objective: str = "latency"
    """What is wanted of it: `latency`, `throughput` or `background`."""
    app: str = ""
    drafts: tuple[str, ...] = ()
    """Texts that the answer may repeat, likeliest first: never part of what decides the result."""
    late: bool = False
    """Whether somebody may come late to read its pieces, if it is sent without `stream`."""
    unread: bool = False
    """Whether it is streamed for its first piece alone: nobody will ever read the others, which may come as one."""

    def admitted(self, priority: int, depth: int, objective: str) -> Request:
        """As it goes to its engine. (`dataclasses.replace` takes five times as long, and this is done for each.)"""
        return Request(
            self.id,
            self.kind,
            self.payload,
            self.query,
            self.tenant,
            priority,
            self.stream,
            self.background,
            self.keep_remote,
            depth,
            objective,
            self.app,
            self.drafts,
            self.late,
            self.unread,
        )
