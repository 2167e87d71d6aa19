"""The request: the unit of work that is sent to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import PrimitiveKind


@dataclass(frozen=True, slots=True)
class Request:
    """A unit of work of a primitive, for an engine."""

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
    """True if the pieces are read. Without a reader, an engine may send only the first piece, and the end. A reader
    that comes later is announced: see `engines.base.listen`."""
    background: bool = False
    """True if it must not delay other requests on the replica (a warm-up during deeper decodings)."""
    keep_remote: bool = False
    """True if only engines read its value: a shared pool may leave a large value where it was computed."""
    depth: int = 0
    """Longest distance of its primitive to the output of its query, when it was admitted."""
    objective: str = "latency"
    """`latency`, `throughput` or `background`."""
    app: str = ""
    drafts: tuple[str, ...] = ()
    """Texts that the answer may repeat, likeliest first. They never affect the result."""
    late: bool = False
    """True if a reader of its pieces may come later, although `stream` is False."""
    unread: bool = False
    """True if it is streamed for its first piece only: the other pieces may arrive as one."""

    def admitted(self, priority: int, depth: int, objective: str) -> Request:
        """Return the request as it is sent to its engine. (`dataclasses.replace` takes five times as long.)"""
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
