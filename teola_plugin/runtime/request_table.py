"""Old names, until everything has moved to `works`."""

from teola_plugin.runtime.works import PendingCall as PendingCall
from teola_plugin.runtime.works import Work as RequestEntry
from teola_plugin.runtime.works import request_id as request_id

__all__ = ["PendingCall", "RequestEntry", "request_id"]
