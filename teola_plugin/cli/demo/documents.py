"""The documents that the demo answers questions about: Python's own reference text, or the user's files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teola_plugin.errors import RegistrationError

DEFAULT_TOPICS = ("try", "exceptions")
"""Texts that every Python installation contains. Their length is such that embedding them takes a noticeable time:
one core embeds some 25 chunks a second."""
DEFAULT_QUESTION = "What does an expression-less except clause match?"
MAX_FILE_BYTES = 20_000_000


def load_documents(paths: Sequence[str]) -> list[Any]:
    """Return the documents to upload. Raise `RegistrationError` for files that are missing, too large or not text."""
    from teola_plugin.adapters.demo_app import document

    if not paths:
        from pydoc_data.topics import topics

        return [document(join_lines(topics[topic]), f"pydoc topic {topic}") for topic in DEFAULT_TOPICS]
    documents = [_read_document(file) for path in paths for file in _text_files(Path(path))]
    if not any(page.page_content.strip() for page in documents):
        raise RegistrationError(
            f"there is no text in {', '.join(paths)}.", hint="give files that hold text, e.g. --docs README.md"
        )
    return documents


def join_lines(text: str) -> str:
    """Return the text with the lines of each paragraph joined; blank lines stay."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs if paragraph.strip())


def _text_files(path: Path) -> list[Path]:
    """Return the readable files in a folder and the folders within it, sorted by path; for a file, that file alone.

    Of a folder, only text, Markdown, reStructuredText, HTML and Python files count, by their suffix.
    """
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in {".txt", ".md", ".rst", ".html", ".py"})
    return [path]


def _read_document(path: Path) -> Any:
    """Read a text file as a document. Raise `RegistrationError` if it is missing, too large or not UTF-8."""
    from teola_plugin.adapters.demo_app import document

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RegistrationError(
                f"{path} is larger than {MAX_FILE_BYTES // 1_000_000} MB.", hint="give smaller files to --docs"
            )
        return document(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RegistrationError(f"cannot read {path}: {error.strerror}.", hint="check the path after --docs") from error
    except UnicodeDecodeError as error:
        raise RegistrationError(
            f"{path} is not UTF-8 text.", hint="convert it to text first; PDF and Office files are not read"
        ) from error
