"""The state that all routes share: models by name, callers, running queries. Used on the server's loop."""

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
from teola_plugin.runtime.query_run import CallPosition, QueryRun
from teola_plugin.server.admission import Admission, AdmissionRefusal
from teola_plugin.server.callers import Caller, KeyLimits, PoolNames, RequestHeaders, find_key, secret_from_headers
from teola_plugin.server.errors import HttpError, not_found, too_many
from teola_plugin.server.live_queries import LiveQueries, LiveQuery, RequestSession
from teola_plugin.server.metrics import Metrics, add_sink
from teola_plugin.server.models.apps import App, app, separate_tenants
from teola_plugin.server.models.base import Model
from teola_plugin.server.models.engines import CarriedEngine, TextEngine, VectorEngine
from teola_plugin.server.models.token_ids import TokenIds
from teola_plugin.server.settings import AppSettings, KeySettings, ServerSettings
from teola_plugin.server.traces import RecentTraces
from teola_plugin.server.tracing import RequestSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ANONYMOUS = KeySettings.model_validate({"name": "anonymous", "hash": "sha256:" + "0" * 64})
"""The key of all requests where the settings have none."""

MAX_APPS = 256
"""Number of app names that are counted and predicted separately."""


class Service:
    """The state of one server. The pool is running."""

    def __init__(
        self,
        pool: EnginePool,
        settings: ServerSettings,
        apps: Mapping[str, AppSettings],
        tracing: TracerProvider | None = None,
    ) -> None:
        """Serve the engines of the pool, and these apps.

        `tracing`: receives the spans of requests; those of queries go where the pool sends them. Raise
        `RegistrationError` and `TraceError` for apps that cannot be served, `ConfigError` for settings.
        """
        self.pool, self.settings = pool, settings
        self.clock = pool.runtime.time
        self.models: dict[str, Model] = engine_models(pool)
        self.models |= {name: app(name, one, pool) for name, one in apps.items()}
        self.token_ids = TokenIds(settings.token_ids, self.models)
        self._apps = [one for one in self.models.values() if isinstance(one, App)]
        if settings.keys:
            separate_tenants(one.per_tenant for one in self._apps)
        self.names = PoolNames()
        self.callers = {key.name: Caller(key, KeyLimits(key, self.clock())) for key in (*settings.keys, ANONYMOUS)}
        self.admission = Admission(settings.max_requests, settings.max_tokens, self.clock)
        self.live = LiveQueries(pool, settings.joined_idle, self.clock, time.time)
        self.traces = RecentTraces()
        self.metrics = Metrics(self)
        self.spans = RequestSpans(tracing)
        self.draining = False
        add_sink(pool, self.traces)
        self.live.on_end = self.metrics.query

    @property
    def is_busy(self) -> bool:
        """True while requests or submitted queries are running."""
        return any(query.users for query in self.live.running)

    # ------------------------------------------------------------ who asks what

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller whose key the headers have. Raise `HttpError` for an unknown or missing key."""
        if not self.settings.keys:
            return self.callers[ANONYMOUS.name]
        key = find_key(
            secret_from_headers(headers.get("authorization", ""), headers.get("x-api-key", "")), self.settings.keys
        )
        if key is None:
            hint = "send it as `Authorization: Bearer KEY`"
            raise HttpError(401, "the API key is missing or not known.", hint=hint, code="invalid_api_key")
        return self.callers[key.name]

    def model(self, name: str, caller: Caller, *kinds: str) -> Model:
        """Return the model of this name, which has to be of one of these kinds.

        Raise `HttpError` otherwise. A model that the caller may not ask counts as missing.
        """
        allowed = {one: model for one, model in self.models.items() if caller.may_ask(one)}
        model = allowed.get(name) or next((m for one, m in allowed.items() if name in self._other_names(one, m)), None)
        if model is None:
            error = unknown_name("model", name, sorted(allowed))
            raise not_found(error.message, error.hint, code="model_not_found")
        if model.kind not in kinds:
            names = ", ".join(sorted(n for n, m in allowed.items() if m.kind in kinds)) or "none here"
            hint = f"ask one of these: {names}"
            raise HttpError(400, f"the model {name!r} is of the kind {model.kind}.", hint=hint, param="model")
        return model

    def _other_names(self, name: str, model: Model) -> tuple[Any, ...]:
        """Return names of a model that requests may use, too: that of what the engine runs, and its folder's path.

        Clients that were written for the model itself thus need no change. A name is None where it is not known; apps
        have no path.
        """
        path = self.pool.versions()[name].get("model") if name in self.pool.engine_names else None
        return model.details().get("root"), path

    async def forget(self, tenant: str) -> None:
        """End the tenant's running queries; delete its traces, its outputs that drafts come from, and what apps store.

        What caches still hold of it becomes unreachable. Raise what stores raise.
        """
        name = await self.names.renew(tenant)
        self.traces.forget(await self.live.forget(tenant))
        for one in self._apps:
            await one.forget(tenant)
        await asyncio.get_running_loop().run_in_executor(None, self.pool.forget, name)

    # ------------------------------------------------------------ one request

    def begin_session(
        self,
        request_id: str,
        caller: Caller,
        headers: RequestHeaders,
        model: Model,
        tokens: int,
        *,
        recovered: bool = False,
    ) -> RequestSession:
        """Accept the request, as a query or as part of one. Raise `HttpError` (429, 503) if it is refused.

        `recovered`: an earlier server accepted it, so only the bounds of the queue count.
        """
        if self.draining:
            raise HttpError(503, "the server is about to stop.", kind="server_error", headers={"Retry-After": "5"})
        refusal = caller.limits.begin(self.clock(), always=recovered)
        if refusal is not None:
            hint = "wait as long as Retry-After says"
            message = f"the key {caller.key.name!r} has reached its limit of {refusal.limit}."
            raise too_many(message, refusal.retry_after, code=f"{refusal.limit}_limit", hint=hint)
        try:
            query = self.live.joined(caller.tenant, headers.query)
            query = query or self._begin_query(caller, headers, model, tokens, recovered)
        except BaseException:
            caller.limits.end(0)
            raise
        query.users += 1
        query.requests += 1
        query.models[model.name] = query.models.get(model.name, 0) + 1
        return RequestSession(request_id, caller, query, CallPosition(headers.depth, headers.gang), self._end)

    def _begin_query(
        self, caller: Caller, headers: RequestHeaders, model: Model, tokens: int, recovered: bool
    ) -> LiveQuery:
        """Begin a query for a request that joins none, if there is room for it and its goal can be met.

        `tokens`: an estimate for prompt and answer. `recovered`: an earlier server accepted it, so its goal is not
        checked. Raise `HttpError` (429) if it is refused.
        """
        name = headers.app or model.name
        if name not in self.admission.counts and name not in self.models and len(self.admission.counts) >= MAX_APPS:
            name = "other"  # names come from callers
        app_goal = model.settings.goal if isinstance(model, App) else None
        deadline = min((s for s in (headers.deadline, caller.key.max_seconds) if s is not None), default=None)
        goal = headers.goal or app_goal or self.settings.goal
        earliest = min((s for s in (goal, deadline) if s is not None), default=None)
        ticket = self.admission.admit(name, tokens, None if recovered else earliest, headers.since)
        if isinstance(ticket, AdmissionRefusal):
            raise _too_many(ticket, earliest)
        until = None if deadline is None else ticket.since + deadline
        query = Query(
            {"input": None},
            app=name,
            tenant=self.names.name_of(caller.tenant),
            deadline=until,
            weight=caller.key.weight,
        )
        return self.live.begin(query, ticket, tenant=caller.tenant, id=headers.query, goal=earliest)

    def _end(self, session: RequestSession, outcome: str) -> None:
        """Count the end of a request for its key and its query. `RequestSession.end` calls it.

        Where the query ended with this request, tokens that only its trace knows are charged later.
        """
        run = session.query.run
        session.caller.limits.end(session.tokens)
        self.live.leave(session.query, outcome)
        if run is not None and session.query.run is None:
            self._charge_later(session, run)

    def _charge_later(self, session: RequestSession, run: QueryRun) -> None:
        """Charge the tokens that an app has cost, which the trace of its query tells once it has ended."""
        loop, limits = asyncio.get_running_loop(), session.caller.limits
        charged = session.tokens - session.outside_tokens

        def charge_rest(future: Future[QueryTrace | None]) -> None:
            """Charge the key for tokens that the session has not charged. Called in the thread that ends the trace."""
            trace = None if future.cancelled() or future.exception() else future.result()
            tokens = 0 if trace is None else sum(span.tokens + span.written for span in trace.spans)
            if tokens > charged and not loop.is_closed():
                loop.call_soon_threadsafe(limits.charge, tokens - charged)

        run.trace.add_done_callback(charge_rest)


def _too_many(refusal: AdmissionRefusal, goal: float | None) -> HttpError:
    """Return the error (429) for a refused query, with the time after which it may be sent again."""
    if refusal.reason == "full":
        message, hint = "the server has as many requests as it takes.", "wait as long as Retry-After says"
    else:
        message = f"the answer would take about {refusal.predicted:.1f} s, and is wanted in {goal or 0:g} s."
        hint = "wait as long as Retry-After says, or allow more time"
    return too_many(message, refusal.retry_after, code="queue_full" if refusal.reason == "full" else "goal", hint=hint)


def engine_models(pool: EnginePool) -> dict[str, Model]:
    """Return models for the engines that answer requests of clients; stores are for apps alone."""
    models: dict[str, Model] = {}
    for name in pool.engine_names:
        engine = pool.engine(name)
        if engine.kinds & LLM_KINDS:
            carries_openai = bool(getattr(engine, "carries_openai", False))
            models[name] = CarriedEngine(pool, name) if carries_openai else TextEngine(pool, name)
        elif PrimitiveKind.EMBEDDING in engine.kinds:
            models[name] = VectorEngine(pool, name, "embedding")
        elif PrimitiveKind.RERANKING in engine.kinds:
            models[name] = VectorEngine(pool, name, "reranking")
    return models
