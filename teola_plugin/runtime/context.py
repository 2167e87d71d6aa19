"""The query that the running code belongs to, so that pool-backed objects called anywhere below join it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from teola_plugin.graph import Terms

if TYPE_CHECKING:
    from teola_plugin.runtime.query_run import QueryRun

current_run: ContextVar[QueryRun | None] = ContextVar("teola_current_run", default=None)

current_terms: ContextVar[Terms | None] = ContextVar("teola_current_terms", default=None)
"""Of calls that belong to no live query: what their caller asked for, also where planning fell back."""
