"""What a document is, by its content. What the client says of it has to fit."""

from __future__ import annotations

import codecs
import re
from typing import Literal

from teola_plugin.server.errors import HttpError

DocumentKind = Literal["text", "html", "pdf"]
_HEAD = 1024
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHARSETS = {
    **dict.fromkeys(("utf-8", "utf8", "us-ascii", "ascii"), "utf-8"),
    **dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "windows-1252", "cp1252"), "windows-1252"),
    "iso-8859-15": "iso-8859-15",
}
"""What pages declare, and how browsers read it. Others are refused: some of Python's codecs do more than decode."""
_DECLARED = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_-]{1,32})", re.IGNORECASE)
_HTML = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,500}?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_TEXT = re.compile(r"text/|application/(?:json|xml|yaml|x-yaml|toml|x-ndjson|markdown)$|.*\+(?:json|xml)$")


def kind_of(data: bytes, declared: str = "", name: str = "") -> DocumentKind:
    """`declared`: the client's content type, if any. Raises `HttpError` (400, 415)."""
    declared = declared.partition(";")[0].strip().lower()
    pdf = data[:_HEAD].lstrip().startswith(b"%PDF-")
    wanted = _wanted(declared, name.lower())
    if pdf != (wanted == "pdf") and wanted != "":
        is_one = "is a PDF" if pdf else "is no PDF"
        raise _wrong(name, f"{is_one}, and is declared as {declared or name.rpartition('.')[2]!r:.80}", "mismatch", 400)
    if pdf:
        return "pdf"
    if declared and not wanted and declared not in _ANY:
        raise _wrong(name, f"is declared as {declared!r:.80}", "unsupported_document", 415)
    text = decoded(data, name)
    if wanted == "html" or (wanted == "" and _HTML.match(text[: 2 * _HEAD])):
        return "html"
    return "text"


_ANY = frozenset({"application/octet-stream", "binary/octet-stream"})
_HTMLS = frozenset({"text/html", "application/xhtml+xml"})


def _wanted(declared: str, name: str) -> str:
    """What the client says that it is: its type, else the end of its name. Empty where that says nothing."""
    if declared == "application/pdf" or (not _said(declared) and name.endswith(".pdf")):
        return "pdf"
    if declared in _HTMLS or (not _said(declared) and name.endswith((".html", ".htm", ".xhtml"))):
        return "html"
    if _TEXT.match(declared) or (not _said(declared) and name.endswith((".txt", ".md", ".csv", ".json"))):
        return "text"
    return ""


def _said(declared: str) -> bool:
    return bool(declared) and declared not in _ANY


def decoded(data: bytes, name: str = "") -> str:
    """The text: by its byte order mark, by what a page declares, else UTF-8. Raises `HttpError` for what is no text."""
    charset = next((codec for bom, codec in _BOMS if data.startswith(bom)), "")
    if not charset and (found := _DECLARED.search(data[:_HEAD])):
        said = found[1].decode().lower()
        if said not in _CHARSETS:
            raise _wrong(name, f"declares the character set {said!r}", "unsupported_document", 415)
        charset = _CHARSETS[said]
    try:
        text = data.decode(charset or "utf-8")
    except UnicodeDecodeError:
        raise _wrong(name, f"is no {(charset or 'UTF-8').upper()} text", "unsupported_document", 415) from None
    if _CONTROL.search(text):
        raise _wrong(name, "is no text", "unsupported_document", 415)
    return text


def _wrong(name: str, why: str, code: str, status: int) -> HttpError:
    hint = "send text (UTF-8), HTML or PDF, and declare it as what it is"
    return HttpError(status, f"the document {name or 'given'!r:.140} {why}.", hint=hint, code=code, param="file")
