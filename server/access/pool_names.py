"""Names of tenants in the pool: by them caches, drafts and traces are apart."""

from __future__ import annotations

import secrets
from typing import Protocol


class KeptNames(Protocol):
    """Where names outlive the server: those of tenants that were forgotten."""

    async def names(self) -> dict[str, str]: ...

    async def put_name(self, tenant: str, name: str) -> None: ...


class PoolNames:
    """A tenant that is forgotten has another name from then on: what caches still hold under the old one is reached by
    nobody, until its place is needed. One owner: the server's loop."""

    def __init__(self) -> None:
        self._renewed: dict[str, str] = {}
        self._kept: KeptNames | None = None

    async def open(self, kept: KeptNames) -> None:
        """Goes on with the names that a server before had: the engines of a shared pool outlive it. Raises what the
        store raises."""
        self._renewed, self._kept = await kept.names(), kept

    def of(self, tenant: str) -> str:
        return self._renewed.get(tenant, tenant)

    async def renewed(self, tenant: str) -> str:
        """The name that the tenant had. The new one is kept before it counts. Raises what the store raises."""
        name = f"{tenant}#{secrets.token_hex(8)}"
        if self._kept is not None:
            await self._kept.put_name(tenant, name)
        old = self.of(tenant)
        self._renewed[tenant] = name
        return old
