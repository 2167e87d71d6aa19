"""For programs that ask a server of `teola serve`: needs httpx, and nothing of the server's."""

from teola_plugin.server.client.client import AsyncTeolaClient, QueryEvent, SubmittedQuery, TeolaClient
from teola_plugin.server.client.joining import AsyncQueryClient, Joined, QueryClient, joining

__all__ = [
    "AsyncQueryClient",
    "AsyncTeolaClient",
    "Joined",
    "QueryClient",
    "QueryEvent",
    "SubmittedQuery",
    "TeolaClient",
    "joining",
]
