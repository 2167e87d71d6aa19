"""Those who wait for the requests of a port. They are told once, whatever they do with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from teola_plugin.requests.results import Piece
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.failures import own
from teola_plugin.runtime.ports.outstanding_requests import OutstandingRequest, OutstandingRequests
from teola_plugin.runtime.ports.port import PortListener

log = logging.getLogger("teola_plugin")


class Callers:
    """Tells a port's listener. One that raises has a fault of its own: everybody else goes on."""

    def __init__(self, engine: str, listener: PortListener, outstanding: OutstandingRequests) -> None:
        self._engine, self._listener, self._outstanding = engine, listener, outstanding

    def started(self, entry: EngineRequest, instance: str, batch: int) -> None:
        self._call("start", self._listener.started, entry, instance, batch)

    def piece(self, entry: EngineRequest, piece: Piece) -> None:
        self._call("pieces", self._listener.piece, entry, piece)

    def ended(self, outstanding: OutstandingRequest, value: Any, error: BaseException | None) -> None:
        """Nothing, if they know already: it was cancelled, or the pool was closed."""
        if self._outstanding.tell(outstanding):
            self.refused(outstanding.entry, value, error)

    def refused(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """`ended` for a request that the port does not hold."""
        self.end(entry, value, None if error is None else own(error))

    def end(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """`refused` with an error that nobody changes, so that no caller needs a copy."""
        if not self._call("end", self._listener.ended, entry, value, error):
            entry.resolve(value, error)  # whoever waits for it does not wait for ever

    def _call(self, what: str, listener: Callable[..., None], *args: Any) -> bool:
        try:
            listener(*args)
        except (Exception, SystemExit):
            log.exception("engine %s: what listens to the %s of a request raised", self._engine, what)
            return False
        return True
