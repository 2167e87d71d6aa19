"""Checkpointers that a server gives to graphs which leave theirs to it, and the command that resumes a graph."""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from teola_plugin.errors import EngineUnavailable, extra

__all__ = ["Command", "memory_saver", "postgres_saver"]


def memory_saver() -> InMemorySaver:
    """Create a checkpointer in this process's memory, whose checkpoints end with the process.

    `app_frameworks.checkpoint_saver` takes it for a server whose store is not a PostgreSQL database.
    """
    return InMemorySaver()


def postgres_saver(pool: Any) -> Any:
    """Create a checkpointer on a connection pool. Raise `EngineUnavailable` if its package is not installed."""
    try:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    except ImportError as error:
        message = "checkpoints in the server's store need langgraph-checkpoint-postgres."
        raise EngineUnavailable(message, hint=extra("checkpoints")) from error
    return AsyncPostgresSaver(pool)
