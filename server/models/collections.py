"""Collections that workflows write into: each tenant has its own.

A collection that no served workflow writes is everybody's: what an app knows. One that some workflow writes holds what
clients gave, and gets a name of the tenant's own, in all workflows of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.server.models.ways import DEPLOYMENT, way_of

Place = tuple[str, str]
"""(engine, collection)"""


def written(fasts: Iterable[Any]) -> frozenset[Place]:
    """Collections that deployed workflows among these write into."""
    from teola_plugin.workflow import PER_QUERY, Indexing, Ingestion

    flows = [fast.workflow.flow for fast in fasts if way_of(fast) is DEPLOYMENT]
    writers = [one for flow in flows for one in flow.everything() if isinstance(one, Indexing | Ingestion)]
    return frozenset(place for one in writers for place in one.collections() if place[1] != PER_QUERY)


def part_tenants(apps: Iterable[TenantsOwn]) -> None:
    """Each tenant has its own of what these apps write."""
    every = list(apps)
    places = written(one.fast for one in every)
    for one in every:
        one.places = places if way_of(one.fast) is DEPLOYMENT else frozenset()


def own_name(collection: str, tenant: str) -> str:
    return f"{collection}@{hashlib.sha256(tenant.encode()).hexdigest()[:24]}"


@dataclass(slots=True, eq=False)
class TenantsOwn:
    """One deployed workflow, as each tenant has it. Lives on the server's loop."""

    fast: Any
    places: frozenset[Place] = frozenset()
    """Collections that each tenant has of its own."""
    _made: dict[str, Any] = field(default_factory=dict)

    def of(self, tenant: str) -> Any:
        """The workflow in this tenant's collections."""
        if not self.places:
            return self.fast
        if tenant not in self._made:
            self._made[tenant] = self.fast.in_collections(
                lambda engine, name: own_name(name, tenant) if (engine, name) in self.places else name
            )
        return self._made[tenant]

    async def forget(self, tenant: str) -> None:
        """Deletes the tenant's collections. Raises what the store raises."""
        self._made.pop(tenant, None)
        for engine, name in self.places:
            deleted = self.fast.pool.admin(engine, "delete_collection", own_name(name, tenant))
            await asyncio.wrap_future(deleted)
