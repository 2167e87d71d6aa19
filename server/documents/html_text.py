"""The text of a page: without scripts, styles and what is hidden; nothing is fetched. Standard library only."""

from __future__ import annotations

import re
from html.parser import HTMLParser

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
    """Paragraphs are parted by blank lines, lines by one."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped = ""
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._depth += tag == self._skipped
            if tag == "body" and self._skipped == "head":  # one that was never closed
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
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")


def text_of_html(page: str) -> str:
    """What a reader of the page sees, as far as its text says."""
    reader = _Text()
    reader.feed(page)
    reader.close()
    lines = (re.sub(r" +", " ", line).strip(" ").strip("\t") for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
