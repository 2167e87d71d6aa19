"""Documents that a client sends along: files of its own, or what the server knows already."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teola_plugin.errors import QueryError

GivenFile = str | Path | Mapping[str, Any]
"""The path of a file, or an object as the server takes it: `{"file_id": ...}`, `{"text": ...}`, `{"url": ...}`."""


def document(given: GivenFile) -> dict[str, Any]:
    """As JSON. Raises `QueryError` for a file that cannot be read."""
    if isinstance(given, Mapping):
        return dict(given)
    path = Path(given)
    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"the document {str(path)!r:.200} cannot be read: {error.strerror or error}."
        raise QueryError(what, hint='give the path of a file, or {"text": "..."}') from error
    type = mimetypes.guess_type(path.name)[0] or ""
    return {"filename": path.name, "file_data": f"data:{type};base64,{base64.b64encode(data).decode()}"}
