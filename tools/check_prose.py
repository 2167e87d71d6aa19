"""Find sentences that are hard to read, in documents and in messages to users: a part of `make check`.

    python tools/check_prose.py [FOLDER]     (default: the repository that this file belongs to)

A sentence may have `MAX_WORDS` words and `MAX_NEGATIONS` negations. It does not begin with a clause as its subject
("What is sent early is ..."), and has none of the `PHRASES`. Questions, code, tables, headings, also those that begin a
paragraph in bold, and generated blocks are not read. Messages and hints of errors are read in the sources, as far as
they are literals; so are the help of commands, messages to logs, and texts of enumerations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from markdown_it.token import Token

sys.path.insert(0, str(Path(__file__).parent))  # tests import this file as a part of `tools`

from source_texts import FILLED_IN, error_texts  # noqa: E402

MAX_WORDS = 30
MAX_NEGATIONS = 1
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md")
NOT_YET_CLEAN: tuple[str, ...] = ()
"""Documents that are not read yet. The list only gets shorter."""
PHRASES = {"for nothing": "say that a result was wasted", "in its place": "say instead, or name what replaces it"}
"""Phrases that have a plainer form."""

_CODE = "`code`"
_SUBJECT_CLAUSE = re.compile(r"(what|who|whatever|whoever)\b", re.IGNORECASE)
_NEGATION = re.compile(r"\b(?:not|no|never|none|nobody|nothing|nowhere|neither|cannot)\b(?!-)|n['’]t\b", re.IGNORECASE)
_WORD = re.compile(r"\w|" + FILLED_IN)
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|vs|approx|etc|resp|cf|No|Fig)|\.\.)\.[\"')\]]*$")


@dataclass(frozen=True)
class Passage:
    """A piece of prose, and its place."""

    file: str
    line: int
    text: str


# ------------------------------------------------------------ the rules


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A point after an abbreviation, or an ellipsis, ends none."""
    begin = 0
    for gap in _END.finditer(text):
        if not _ABBREVIATION.search(text[begin : gap.start()]):
            yield text[begin : gap.start()].strip()
            begin = gap.end()
    yield text[begin:].strip()


def faults(sentence: str) -> Iterator[str]:
    """Yield what is wrong with a sentence. Questions are never wrong."""
    if sentence.rstrip("\"'”’)*").endswith("?"):
        return
    if _SUBJECT_CLAUSE.match(sentence.lstrip("\"'“‘(*")):
        yield "begins with a clause as its subject: name the thing first"
    for phrase, remedy in PHRASES.items():
        if re.search(rf"\b{phrase}\b", sentence, re.IGNORECASE):
            yield f"has {phrase!r}: {remedy}"
    negations = _NEGATION.findall(sentence)
    if len(negations) > MAX_NEGATIONS:
        yield f"has {len(negations)} negations ({', '.join(negations)}); at most {MAX_NEGATIONS}"
    words = sum(1 for word in sentence.split() if _WORD.search(word))
    if words > MAX_WORDS:
        yield f"has {words} words; at most {MAX_WORDS}"


# ------------------------------------------------------------ the texts


def document_passages(file: str, text: str) -> Iterator[Passage]:
    """Yield the paragraphs and items of lists of a Markdown text, with code and links as they are read aloud."""
    blanked = re.sub(r"(?s)<!-- generated: .*?<!-- end -->", lambda block: "\n" * block[0].count("\n"), text)
    skipped = 0
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(blanked):
        if token.type in ("heading_open", "table_open"):
            skipped += 1
        elif token.type in ("heading_close", "table_close"):
            skipped -= 1
        elif token.type == "inline" and not skipped and token.map:
            yield Passage(file, token.map[0] + 1, "".join(_spoken(token)))


def _spoken(token: Token) -> Iterator[str]:
    """Yield the parts of a paragraph as they are read aloud, without a heading in bold that begins it."""
    children = token.children or []
    types = [child.type for child in children]
    if "strong_open" in types[:2] and "strong_close" in types:  # an empty text may stand before it
        end = types.index("strong_close")
        if children[end - 1].content.endswith((".", "?", ":")):
            children = children[end + 1 :]
    for child in children:
        if child.type == "code_inline":
            yield _CODE
        elif child.type in ("softbreak", "hardbreak"):
            yield " "
        elif child.type == "text":
            yield child.content


def message_passages(root: Path) -> Iterator[Passage]:
    """Yield messages to users and hints, each alternative by itself, with code as it is read aloud."""
    for found in error_texts(root):
        for text in (found.message, found.hint):
            for alternative in re.sub(r"`[^`]*`", _CODE, text).split(" | "):
                yield Passage(found.file, found.line, " ".join(alternative.split()))


def passages(root: Path) -> Iterator[Passage]:
    """Yield all prose below a folder, but for `NOT_YET_CLEAN`."""
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            file = path.relative_to(root).as_posix()
            if file not in NOT_YET_CLEAN:
                yield from document_passages(file, path.read_text(encoding="utf-8"))
    yield from message_passages(root)


def problems(root: Path) -> list[str]:
    """Return a text for each fault: the place, what is wrong, and the sentence."""
    texts = {
        f"{passage.file}:{passage.line}: {fault}\n    {sentence}": None
        for passage in passages(root)
        for sentence in sentences(passage.text)
        for fault in faults(sentence)
    }
    return list(texts)


def main() -> int:
    """Print what is wrong. Return the exit status: 1 if anything is."""
    texts = problems(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve())
    if texts:
        print("\n".join(texts))
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
