"""What is logged: ids and figures, as text or JSON. What was asked, answered or used as a key stands in no line.

An exception's message may repeat a prompt, so a line has its type and where it was raised; with `log_details: true` its
message, too.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from teola_plugin.server.settings import ServerSettings

log = logging.getLogger("teola_plugin.server")
_OURS = ("teola_plugin", "uvicorn.error")
_Info = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def request_line(about: Mapping[str, Any]) -> None:
    """One request has ended."""
    log.info("%s", " ".join(f"{key}={value}" for key, value in about.items() if value != ""), extra={"about": about})


def named(error: BaseException, settings: ServerSettings) -> str:
    """An exception, for a line."""
    name = type(error).__name__
    return f"{name}: {error}" if settings.log_details else name


class Lines(logging.Formatter):
    """Lines of text."""

    def __init__(self, *, details: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._details = details

    def formatException(self, ei: _Info) -> str:
        """Where it was raised, and its type; its message and that of its causes only if details are wanted."""
        if self._details or ei[1] is None:
            return super().formatException(ei)
        told = traceback.TracebackException.from_exception(ei[1], lookup_lines=False)
        frames = "".join(f"  {frame.filename}:{frame.lineno} in {frame.name}\n" for frame in told.stack)
        return f"{frames}{type(ei[1]).__name__} (log_details: true tells its message)"


class JsonLines(Lines):
    """One JSON object a line: `time`, `level`, then what a request line tells, or `logger`, `message` and `error`."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {"time": round(record.created, 6), "level": record.levelname.lower()}
        about = getattr(record, "about", None)
        if about is not None:
            return json.dumps({**found, **about})
        found |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def log_to_stderr(settings: ServerSettings) -> None:
    """Warnings and errors, and one line for each request unless the settings say `off`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonLines if settings.log == "json" else Lines)(details=settings.log_details))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    log.setLevel(logging.WARNING if settings.log == "off" else logging.INFO)
