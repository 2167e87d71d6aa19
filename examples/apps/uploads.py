"""What a user uploads with a question: text, HTML and PDF (the latter two by LlamaIndex's readers, extra `readers`)."""

from __future__ import annotations

import re
from pathlib import Path

CHUNK, OVERLAP = 256, 30
"""In tokens, as in the paper."""
CHARACTERS = 4
"""That a token is taken as."""
TOPICS = ("try", "exceptions")
"""Of Python's reference, which is on every machine that has Python: the upload where none is given."""


def read(path: str | None) -> str:
    """The text of an upload. Raises `SystemExit` with what to do for one that cannot be read."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(flowing(topics[topic]) for topic in TOPICS)
    file = Path(path)
    if not file.is_file():
        raise SystemExit(f"there is no file {path!r}: give --document a text, HTML or PDF file")
    if file.suffix.lower() in (".pdf", ".html", ".htm"):
        return _by_reader(file)
    try:
        return flowing(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise SystemExit(f"{path!r} is not UTF-8 text: give --document a text, HTML or PDF file") from None


def _by_reader(file: Path) -> str:
    try:
        from llama_index.readers.file import HTMLTagReader, PDFReader
    except ImportError:
        raise SystemExit(f"{file.name} needs LlamaIndex's readers: pip install '.[readers]'") from None
    is_pdf = file.suffix.lower() == ".pdf"
    reader = PDFReader() if is_pdf else HTMLTagReader(tag="body", ignore_no_id=False)
    pages = reader.load_data(file)
    text = "\n\n".join(flowing(page.text) for page in pages).strip()
    if not text:
        raise SystemExit(f"{file.name} holds no text: a scanned PDF has to be made readable first")
    return text


def flowing(text: str) -> str:
    """The text with the lines of each paragraph joined; blank lines stay."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs if paragraph.strip())
