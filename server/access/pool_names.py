"""Names of tenants in the pool: by them caches, drafts and traces are apart."""

from __future__ import annotations

import secrets


class PoolNames:
    """A tenant that is forgotten has another name from then on: what caches still hold under the old one is reached by
    nobody, until its place is needed. One owner: the server's loop."""

    def __init__(self) -> None:
        self._renewed: dict[str, str] = {}

    def of(self, tenant: str) -> str:
        return self._renewed.get(tenant, tenant)

    def renewed(self, tenant: str) -> str:
        """The name that the tenant had."""
        old = self.of(tenant)
        self._renewed[tenant] = f"{tenant}#{secrets.token_hex(8)}"
        return old
