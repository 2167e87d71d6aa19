"""The server's log: ids and figures, as text or JSON. No line holds a prompt, an answer or a key.

The message of an exception may repeat a prompt, so a line has only its type and where it was raised; with `log_details:
true` also its message.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from teola_plugin.server.settings import ServerSettings

log = logging.getLogger("teola_plugin.server")
_LOGGERS = ("teola_plugin", "uvicorn.error")
_Info = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def request_line(fields: Mapping[str, Any]) -> None:
    """Log that one request has ended. `fields`: ids and figures of it."""
    log.info("%s", " ".join(f"{key}={value}" for key, value in fields.items() if value != ""), extra={"fields": fields})


def describe_error(error: BaseException, settings: ServerSettings) -> str:
    """Return the type of an exception, and its message if the settings allow that, for a line of the log.

    By default the message is left out, because an app's exception may repeat a prompt; `log_details: true` adds it.
    """
    name = type(error).__name__
    return f"{name}: {error}" if settings.log_details else name


class Lines(logging.Formatter):
    """A formatter of lines of text."""

    def __init__(self, *, details: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._details = details

    def format(self, record: logging.LogRecord) -> str:
        """Format a line without the exception's text that Python keeps for other handlers, which show other things."""
        cached_text, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = cached_text

    def formatException(self, ei: _Info) -> str:
        """Return where an exception was raised, and its type; messages only if details are wanted."""
        if self._details or ei[1] is None:
            return super().formatException(ei)
        summary = traceback.TracebackException.from_exception(ei[1], lookup_lines=False)
        frames = "".join(f"  {frame.filename}:{frame.lineno} in {frame.name}\n" for frame in summary.stack)
        return f"{frames}{type(ei[1]).__name__} (log_details: true tells its message)"


class JsonLines(Lines):
    """A formatter of one JSON object a line: `time`, `level`, then the fields of a request line, or `logger`, `message`
    and `error`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON: the fields of a request line, or logger, message and error."""
        line: dict[str, Any] = {"time": round(record.created, 6), "level": record.levelname.lower()}
        fields = getattr(record, "fields", None)
        if fields is not None:
            return json.dumps({**line, **fields})
        line |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@contextmanager
def logging_to_stderr(settings: ServerSettings) -> Iterator[None]:
    """Log warnings, errors and, unless the settings say `off`, one line for each request, while the body runs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonLines if settings.log == "json" else Lines)(details=settings.log_details))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in (*loggers, log)]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    log.setLevel(logging.WARNING if settings.log == "off" else logging.INFO)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
