"""Addresses for operators and machines: liveness, readiness, versions, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from teola_plugin import __version__
from teola_plugin.server.errors import HttpError
from teola_plugin.server.models.base import shown_versions
from teola_plugin.server.routes.answering import service_of

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Answer that the process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer whether requests are accepted: not before the pool is up, and not while the server drains."""
    service = service_of(request)
    if service.draining or not service.pool.running:
        return JSONResponse({"status": "draining" if service.draining else "down"}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version")
def version(request: Request) -> dict[str, Any]:
    """Return the version of the package; to operators also what runs below each engine."""
    service = service_of(request)
    if not service.caller(request.headers).key.operator and service.settings.keys:
        return {"version": __version__}
    return {"version": __version__, "engines": shown_versions(service.pool)}


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Return metrics for Prometheus; where there are keys, to operators alone."""
    operators_only(request)
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def operators_only(request: Request) -> None:
    """Raise `HttpError` for a key that is no operator's.

    The status is 403, or 401 for a missing or unknown key. A server without keys lets everybody pass: only this machine
    reaches it.
    """
    service = service_of(request)
    if service.settings.keys and not service.caller(request.headers).key.operator:
        hint = "give a key whose settings say operator: true"
        raise HttpError(403, "this is for operators.", hint=hint, kind="permission_error", code="forbidden")
