"""The last batches of an engine and what they held, so that one can see queries of several apps in one."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

KEPT = 512


class BatchLog:
    """As plain data, oldest first."""

    def __init__(self) -> None:
        self._batches: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def note(self, batch: int, instance: str, client: str, app: str, primitive: str) -> None:
        """A request went into the batch of that number."""
        if not self._batches or self._batches[-1]["batch"] != batch:
            self._batches.append({"batch": batch, "instance": instance, "at": time.time(), "apps": [], "members": []})
        last = self._batches[-1]
        last["members"].append((client, app, primitive))
        if app not in last["apps"]:
            last["apps"].append(app)

    def recent(self) -> list[dict[str, Any]]:
        """Number, instance, wall time, apps, and (client, app, primitive) of each request."""
        return list(self._batches)
