"""What all routes share: models by name, who may ask them, which queries are under way. Lives on the server's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import unknown_name
from teola_plugin.graph import LLM_KINDS, PrimitiveKind, Query
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import CallPlace
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.server.admission import Admission, Refused
from teola_plugin.server.callers import Caller, KeyLimits, PoolNames, Told
from teola_plugin.server.errors import HttpError, not_found, too_many
from teola_plugin.server.keys import found, secret_in
from teola_plugin.server.live_queries import LiveQueries, LiveQuery, Visit
from teola_plugin.server.metrics import Metrics, hear
from teola_plugin.server.models.apps import App, app, part_tenants
from teola_plugin.server.models.base import Model
from teola_plugin.server.models.engines import CarriedEngine, TextEngine, VectorEngine
from teola_plugin.server.models.token_ids import TokenIds
from teola_plugin.server.settings import AppSettings, KeySettings, ServerSettings
from teola_plugin.server.traces import KeptTraces
from teola_plugin.server.tracing import RequestSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NOBODY = KeySettings.model_validate({"name": "anonymous", "hash": "sha256:" + "0" * 64})
"""Who asks where there are no keys."""

MOST_APPS = 256
"""Names of apps that are counted and predicted apart."""


class Service:
    """One server's state. The pool is running."""

    def __init__(
        self,
        pool: EnginePool,
        settings: ServerSettings,
        apps: Mapping[str, AppSettings],
        tracing: TracerProvider | None = None,
    ) -> None:
        """`tracing`: where spans of requests go; those of queries go where the pool sends them.

        Raises `RegistrationError` and `TraceError` for apps that cannot be served, `ConfigError` for settings.
        """
        self.pool, self.settings = pool, settings
        self.clock = pool.runtime.time
        self.models: dict[str, Model] = engine_models(pool)
        self.models |= {name: app(name, one, pool) for name, one in apps.items()}
        self.token_ids = TokenIds(settings.token_ids, self.models)
        self._apps = [one for one in self.models.values() if isinstance(one, App)]
        if settings.keys:
            part_tenants(one.own for one in self._apps)
        self.names = PoolNames()
        self.callers = {key.name: Caller(key, KeyLimits(key, self.clock())) for key in (*settings.keys, NOBODY)}
        self.admission = Admission(settings.max_requests, settings.max_tokens, self.clock)
        self.live = LiveQueries(pool, settings.joined_idle, self.clock, time.time)
        self.traces = KeptTraces()
        self.metrics = Metrics(self)
        self.spans = RequestSpans(tracing)
        self.draining = False
        hear(pool, self.traces)
        self.live.on_end = self.metrics.query

    @property
    def busy(self) -> bool:
        """Whether requests or submitted queries are under way."""
        return any(query.users for query in self.live.running)

    # ------------------------------------------------------------ who asks what

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises `HttpError` for a key that is not known, or missing."""
        if not self.settings.keys:
            return self.callers[NOBODY.name]
        key = found(secret_in(headers.get("authorization", ""), headers.get("x-api-key", "")), self.settings.keys)
        if key is None:
            hint = "send it as `Authorization: Bearer KEY`"
            raise HttpError(401, "the API key is missing or not known.", hint=hint, code="invalid_api_key")
        return self.callers[key.name]

    def model(self, name: str, caller: Caller, *kinds: str) -> Model:
        """Of one of these kinds. Raises `HttpError`: to who may not ask it, it is not there."""
        known = {one: model for one, model in self.models.items() if caller.may_ask(one)}
        model = known.get(name) or next((m for one, m in known.items() if name in self._other_names(one, m)), None)
        if model is None:
            raise not_found(*_said(unknown_name("model", name, sorted(known))), code="model_not_found")
        if model.kind not in kinds:
            right = ", ".join(sorted(n for n, m in known.items() if m.kind in kinds)) or "none here"
            hint = f"ask one of these: {right}"
            raise HttpError(400, f"the model {name!r} is of the kind {model.kind}.", hint=hint, param="model")
        return model

    def _other_names(self, name: str, model: Model) -> tuple[Any, ...]:
        """Return names of a model that requests may use, too: that of what the engine runs, and its folder's path."""
        path = self.pool.versions()[name].get("model") if name in self.pool.engine_names else None
        return model.told().get("root"), path

    async def forget(self, tenant: str) -> None:
        """Ends what this tenant has under way, and forgets what happened to it: traces, outputs to draft from, what
        apps keep. What caches still hold of it is found by nobody. Raises what stores raise."""
        name = await self.names.renewed(tenant)
        self.traces.forget(await self.live.forget(tenant))
        for one in self._apps:
            await one.forget(tenant)
        await asyncio.get_running_loop().run_in_executor(None, self.pool.forget, name)

    # ------------------------------------------------------------ one request

    def visit(
        self, request_id: str, caller: Caller, told: Told, model: Model, tokens: int, *, again: bool = False
    ) -> Visit:
        """The request is taken, as a query or as part of one. Raises `HttpError` (429, 503) where it is not. `again`:
        it was taken by a server before, and only the bounds of the queue count."""
        if self.draining:
            raise HttpError(503, "the server is about to stop.", kind="server_error", headers={"Retry-After": "5"})
        refusal = caller.limits.begin(self.clock(), always=again)
        if refusal is not None:
            hint = "wait as long as Retry-After says"
            message = f"the key {caller.key.name!r} has reached its limit of {refusal.what}."
            raise too_many(message, refusal.retry_after, code=f"{refusal.what}_limit", hint=hint)
        try:
            query = self.live.joined(caller.tenant, told.query) or self._begin(caller, told, model, tokens, again)
        except BaseException:
            caller.limits.end(0)
            raise
        query.users += 1
        query.requests += 1
        query.models[model.name] = query.models.get(model.name, 0) + 1
        return Visit(request_id, caller, query, CallPlace(told.depth, told.gang), self._end)

    def _begin(self, caller: Caller, told: Told, model: Model, tokens: int, again: bool) -> LiveQuery:
        name = self._app(told.app or model.name)
        deadline, goal = told.deadline_within(caller.key), told.goal or self._goal(model)
        wanted = min((s for s in (goal, deadline) if s is not None), default=None)
        ticket = self.admission.ask(name, tokens, None if again else wanted, told.since)
        if isinstance(ticket, Refused):
            raise _refused(ticket, wanted)
        until = None if deadline is None else ticket.since + deadline
        query = Query(
            {"input": None}, app=name, tenant=self.names.of(caller.tenant), deadline=until, weight=caller.key.weight
        )
        return self.live.begin(query, ticket, tenant=caller.tenant, id=told.query, goal=wanted)

    def _app(self, name: str) -> str:
        """Names come from callers: those that are too many count as one."""
        known = self.admission.counts
        return name if name in known or name in self.models or len(known) < MOST_APPS else "other"

    def _goal(self, model: Model) -> float | None:
        own = model.settings.goal if isinstance(model, App) else None
        return own or self.settings.goal

    def _end(self, visit: Visit, outcome: str) -> None:
        run = visit.query.run
        visit.caller.limits.end(visit.tokens)
        self.live.leave(visit.query, outcome)
        if run is not None and visit.query.run is None:
            self._charge_later(visit, run)

    def _charge_later(self, visit: Visit, run: QueryRun) -> None:
        """What an app has cost stands in the trace of its query, which comes when that is over."""
        loop, limits, known = asyncio.get_running_loop(), visit.caller.limits, visit.tokens - visit.elsewhere

        def ended(trace: Future[QueryTrace | None]) -> None:
            found = None if trace.cancelled() or trace.exception() else trace.result()
            tokens = 0 if found is None else sum(span.tokens + span.written for span in found.spans)
            if tokens > known and not loop.is_closed():
                loop.call_soon_threadsafe(limits.charge, tokens - known)

        run.trace.add_done_callback(ended)


def _refused(refused: Refused, goal: float | None) -> HttpError:
    if refused.why == "full":
        message, hint = "the server has as many requests as it takes.", "wait as long as Retry-After says"
    else:
        message = f"the answer would take about {refused.predicted:.1f} s, and is wanted in {goal or 0:g} s."
        hint = "wait as long as Retry-After says, or allow more time"
    return too_many(message, refused.retry_after, code="queue_full" if refused.why == "full" else "goal", hint=hint)


def _said(error: Exception) -> tuple[str, str]:
    return getattr(error, "message", str(error)), getattr(error, "hint", "")


def engine_models(pool: EnginePool) -> dict[str, Model]:
    """Engines that answer something a client may ask for; stores are for apps."""
    found: dict[str, Model] = {}
    for name in pool.engine_names:
        engine = pool.engine(name)
        if engine.kinds & LLM_KINDS:
            carried = bool(getattr(engine, "carries_openai", False))
            found[name] = CarriedEngine(pool, name) if carried else TextEngine(pool, name)
        elif PrimitiveKind.EMBEDDING in engine.kinds:
            found[name] = VectorEngine(pool, name, "embedding")
        elif PrimitiveKind.RERANKING in engine.kinds:
            found[name] = VectorEngine(pool, name, "reranking")
    return found
