"""Count what makes our sources hard to read for somebody new, and fail above the limits: a part of `make check`.

    python tools/check_readability.py [FOLDER]     (default: the repository that this file belongs to)

Reads the Python files of the four packages as syntax trees and runs nothing.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("teola_plugin", "adapters", "tracer", "server")

# The limits are what the sources reach today, with a little room. They only go down (the length of a function: up).
MAX_VAGUE_NAMES_PER_1000_LINES = 1.0
MAX_PRIVATE_WORDS = 0
MAX_FRAGMENT_DOCSTRINGS = 0.0012
"""The share of all docstrings that may begin with a fragment."""
MAX_REPEATED_CLASS_NAMES = 0
MAX_FILES = 480
MIN_MEDIAN_FUNCTION_LINES = 7
MAX_LONG_FILES = 0
MAX_CLASSES_WITH_MANY_BOOLEANS = 0

MAX_LISTED = 100
LONG_FILE_LINES = 600
REPEATED_IN_FILES = 3
MANY_BOOLEANS = 6
VAGUE_NAMES = frozenset(
    "told said asked heard held given found made known wanted taken kept begun over own beside came had alike gone"
    " shown lent gained missed least most once again behind ahead together place places way ways whole named what why"
    " ended early chosen served lost alone here there then refused needed about nothing others each sent".split()
)
"""Participles and function words: as a name, none says what its value is."""
PRIVATE_WORDS = {
    "ahead": "prefetched",
    "asked": "requested",
    "believed": "speculative",
    "beside": "parallel",
    "eager": "speculative",
    "early": "prefetched or speculative",
    "provisional": "speculative",
    "sure": "certain",
    "tentative": "speculative",
    "terms": "request context",
    "told": "reported",
}
"""Words of this project alone, which no name may have as a part, and the terms of ARCHITECTURE.md for them."""
ALLOWED_NAMES = {
    "test_a_caller_may_leave_early": "ordinary English: the caller stops reading",
    "test_searches_beside_writes_tell_no_version_of_other_rows": "a test of the conformance suite",
}
"""Names with such a word that stay, and why."""
FRAGMENTS = frozenset(
    "what whether of who whose where when its it as for from by with without beside behind how that these those such"
    " nothing nobody none all any they then than so because also not no".split()
)
"""Words with which a sentence with a verb in the imperative, or a noun phrase with an article, does not begin."""


@dataclass
class Counts:
    """The totals over all files, and by measure the places that count: (file, line, text)."""

    files: int = 0
    lines: int = 0
    docstrings: int = 0
    function_lines: list[int] = field(default_factory=list)
    class_places: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By name of a class: the line of its definition by file."""
    places: dict[str, list[tuple[str, int, str]]] = field(default_factory=lambda: defaultdict(list))


def python_files(root: Path) -> Iterator[Path]:
    """Yield the files of the packages, each once: `teola_plugin` has links to the other packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.resolve() == path:
                yield path


def names_defined_by(node: ast.AST) -> Iterator[str]:
    """Yield the names of the functions, classes, parameters, variables and attributes that a node defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name


def words_of(name: str) -> set[str]:
    """Return the words of a name, in lower case: those between underscores, or with capitals in a class's name."""
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def count_file(name: str, text: str, counts: Counts) -> None:
    """Add a file to the counts."""
    lines = text.count("\n")
    counts.files, counts.lines = counts.files + 1, counts.lines + lines
    if lines > LONG_FILE_LINES:
        counts.places["long files"].append((name, LONG_FILE_LINES + 1, f"{lines} lines"))
    for node in ast.walk(ast.parse(text)):
        for defined in names_defined_by(node):
            if defined.strip("_").lower() in VAGUE_NAMES:
                counts.places["vague names"].append((name, getattr(node, "lineno", 1), defined))
            for word in words_of(defined) & PRIVATE_WORDS.keys() if defined not in ALLOWED_NAMES else ():
                detail = f"{defined}: say {PRIVATE_WORDS[word]} for {word}"
                counts.places["private words"].append((name, getattr(node, "lineno", 1), detail))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            counts.function_lines.append(length)
            if length < MIN_MEDIAN_FUNCTION_LINES:
                counts.places["short functions"].append((name, node.lineno, f"{node.name} has {length} lines"))
        if isinstance(node, ast.ClassDef):
            counts.class_places[node.name.lstrip("_")][name] = node.lineno
            booleans = [s for s in node.body if isinstance(s, ast.AnnAssign) and ast.unparse(s.annotation) == "bool"]
            if len(booleans) >= MANY_BOOLEANS:
                detail = f"{node.name} has {len(booleans)} fields that are bool"
                counts.places["classes with many booleans"].append((name, node.lineno, detail))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words = (ast.get_docstring(node) or "").split()
            counts.docstrings += bool(words)
            if words and words[0].strip("`'\"(),.:;").lower() in FRAGMENTS:
                counts.places["fragment docstrings"].append((name, node.lineno, " ".join(words[:8])))


def problems(root: Path) -> list[str]:
    """Return one text for each measure above its limit, followed by the files and lines that count."""
    counts = Counts()
    for path in python_files(root):
        count_file(str(path.relative_to(root)), path.read_text(encoding="utf-8"), counts)
    repeated = {name: by_file for name, by_file in counts.class_places.items() if len(by_file) >= REPEATED_IN_FILES}
    places = counts.places
    places["repeated class names"] = [(file, n, name) for name in repeated for file, n in repeated[name].items()]
    vague, fragments = len(places["vague names"]), len(places["fragment docstrings"])
    median = statistics.median(counts.function_lines or [MIN_MEDIAN_FUNCTION_LINES])
    rows = (
        ("vague names", 1000 * vague / max(counts.lines, 1), MAX_VAGUE_NAMES_PER_1000_LINES, "per 1,000 lines"),
        ("private words", len(places["private words"]), MAX_PRIVATE_WORDS, "in names"),
        ("fragment docstrings", fragments / max(counts.docstrings, 1), MAX_FRAGMENT_DOCSTRINGS, "of all docstrings"),
        ("repeated class names", len(repeated), MAX_REPEATED_CLASS_NAMES, f"in {REPEATED_IN_FILES} or more files"),
        ("files", counts.files, MAX_FILES, "in all packages"),
        ("long files", len(places["long files"]), MAX_LONG_FILES, f"above {LONG_FILE_LINES} lines"),
        ("classes with many booleans", len(places["classes with many booleans"]), MAX_CLASSES_WITH_MANY_BOOLEANS, ""),
    )
    texts = []
    for measure, value, limit, unit in rows:
        if value > limit:
            texts.append(f"{measure}: {value:.4g} {unit}".rstrip() + f"; at most {limit}")
            texts += listing(places[measure])
    if median < MIN_MEDIAN_FUNCTION_LINES:
        texts.append(f"lines of a function (median): {median:.4g}; at least {MIN_MEDIAN_FUNCTION_LINES}")
        texts += listing(places["short functions"])
    return texts


def listing(places: list[tuple[str, int, str]]) -> list[str]:
    """Return a line for each place, at most `MAX_LISTED`."""
    lines = [f"  {file}:{line}: {text}" for file, line, text in sorted(places)]
    return lines[:MAX_LISTED] + [f"  ... and {len(lines) - MAX_LISTED} more"] * (len(lines) > MAX_LISTED)


def main() -> int:
    """Print what is above a limit. Return the exit status: 1 if anything is."""
    texts = problems(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve())
    if texts:
        print("\n".join(texts))
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
