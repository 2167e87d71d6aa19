"""A process that reads one document and ends, so that a malicious document does its harm here.

It reads the document from its input and writes JSON: `{"text", "pages"}`, or `{"error", "message"}`. Its memory, time,
files and network are limited before it looks at the document. `reading.py` runs it as a script.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any

_SKIPPED = frozenset({"script", "style", "template", "noscript", "iframe", "object", "embed", "svg", "math", "head"})
_VOID = frozenset({"embed"})
_BLOCKS = frozenset(
    {
        *("p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "blockquote", "pre", "figure"),
        *("h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "form", "fieldset", "address", "hr"),
    }
)
_LINES = frozenset({"br", "li", "tr", "dt", "dd", "option", "caption", "figcaption"})
_CELLS = frozenset({"td", "th"})


class _Text(HTMLParser):
    """A parser that collects the text of a page: paragraphs separated by blank lines, lines by line breaks."""

    def __init__(self) -> None:
        """Begin a page without text.

        `parts` collects pieces of text and breaks. `_skipped` is the name of the element that is being skipped, empty
        for none, and `_depth` the number of elements of that name that are open.
        """
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped = ""
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin to skip an element that readers do not see, or break the text where the element begins a block, line or
        cell.

        While an element is skipped, those of the same name inside it are counted, so that its own end is found.
        """
        if self._skipped:
            self._depth += tag == self._skipped
            if tag == "body" and self._skipped == "head":  # a head that was never closed
                self._skipped = ""
            return
        if tag in _SKIPPED and tag not in _VOID:
            self._skipped, self._depth = tag, 1
        else:
            self._break(tag)
            self.parts += ["\t"] if tag in _CELLS else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._skipped:
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        """End the skipping of an element, or break the text after a block."""
        if self._skipped == tag:
            self._depth -= 1
            if not self._depth:
                self._skipped = ""
        elif not self._skipped and tag in _BLOCKS:
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        """Add the line breaks that separate an element from the text before it: two for a block, one for a line.

        Called where an element begins, and where a block ends. Elements within a line, such as links, add nothing.
        """
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")


def text_of_html(page: str) -> str:
    """Return the text that a reader of the page sees, without scripts, styles and hidden parts. Nothing is fetched."""
    reader = _Text()
    reader.feed(page)
    reader.close()
    lines = (re.sub(r" +", " ", line).strip(" ").strip("\t") for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")


class RefusedDocument(Exception):
    """The refusal of a document. `args`: a code, and what is wrong with the document."""


def confine(memory: int, seconds: int) -> None:
    """Limit memory and time of this process; forbid it to write files, start processes and use the network."""
    with suppress(ImportError):  # not on Windows: there, time alone is bounded
        import resource

        for resource_kind, limit in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource_kind, (limit, limit))
    sys.addaudithook(_forbid)


_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "ctypes.")


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _forbid(event: str, args: Any) -> None:
    if event.startswith(_FORBIDDEN) or (event == "open" and isinstance(args[2], int) and args[2] & _WRITING):
        raise PermissionError(f"{event} is not for readers of documents")


def of_pdf(data: bytes, pages: int, characters: int) -> dict[str, Any]:
    """Return the text of a PDF. Raise `RefusedDocument`, and whatever pypdf raises."""
    from io import BytesIO

    from pypdf import PasswordType, PdfReader

    reader = PdfReader(BytesIO(data), strict=False)
    if reader.is_encrypted and not _is_unlocked(reader, PasswordType):
        raise RefusedDocument("encrypted_document", "is encrypted")
    texts, length = list[str](), 0
    for number, page in enumerate(reader.pages):
        if number >= pages:
            raise RefusedDocument("too_many_pages", f"has more than {pages} pages")
        text = page.extract_text().strip()
        length += len(text) + 2
        if length > characters:
            raise RefusedDocument("document_too_long", f"holds more than {characters} characters")
        texts.append(text)
    return {"text": "\n\n".join(one for one in texts if one), "pages": len(texts)}


def _is_unlocked(reader: Any, kinds: Any) -> bool:
    """Return True if the PDF opens without a password, as many encrypted ones do.

    `kinds`: pypdf's `PasswordType`. False also for ciphers that pypdf cannot decrypt without a further package.
    """
    try:
        return bool(reader.decrypt("") != kinds.NOT_DECRYPTED)
    except Exception:  # a cipher that pypdf alone does not support
        return False


def of_html(data: bytes, pages: int, characters: int) -> dict[str, Any]:
    """Return the text of a page, which comes as UTF-8. Raise `RefusedDocument`.

    It is refused if its text has more than `characters`. `pages` has no meaning here; the signature is that of
    `of_pdf`.
    """
    text = text_of_html(data.decode())
    if len(text) > characters:
        raise RefusedDocument("document_too_long", f"holds more than {characters} characters")
    return {"text": text, "pages": None}


def read(kind: str, data: bytes, pages: int, characters: int) -> dict[str, Any]:
    """Return what the process writes about the document."""
    try:
        result = (of_pdf if kind == "pdf" else of_html)(data, pages, characters)
        result["text"] = _CONTROL.sub("", result["text"]).encode("utf-8", "replace").decode()
        return result
    except RefusedDocument as error:
        return {"error": error.args[0], "message": error.args[1]}
    except (MemoryError, RecursionError):
        return {"error": "document_too_complex", "message": "needs more memory than it may have"}
    except Exception as error:
        return {"error": "broken_document", "message": f"cannot be read ({type(error).__name__})"}


def main() -> None:
    """Read the document from standard input within the limits, and write the result as JSON to standard output.

    Arguments of the process: kind, pages, characters, bytes of memory, seconds.
    """
    kind, pages, characters, memory, seconds = sys.argv[1], *map(int, sys.argv[2:6])
    data = sys.stdin.buffer.read()
    if kind == "pdf":
        import pypdf  # noqa: F401 - before its memory is bounded
    confine(memory, seconds)
    sys.stdout.write(json.dumps(read(kind, data, pages, characters)))


if __name__ == "__main__":
    main()
