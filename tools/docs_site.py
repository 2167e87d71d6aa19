"""A hook of MkDocs: adds pages to the site that stand outside `docs` or are made of the code.

* README.md, ARCHITECTURE.md, CHANGELOG.md and CONTRIBUTING.md become pages; links to them follow.
* The reference of Python names is made by mkdocstrings, that of commands and of environment variables here.
* Links to files that are no pages, such as examples and results, become plain text, unless `extra.source_url` in
  mkdocs.yml says where the repository is.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the site by the file in the root of the repository that they show."""
REFERENCE = {
    "python": ("teola_plugin.accelerate", "teola_plugin.uninstall", "teola_plugin.EnginePool", "teola_plugin.errors"),
    "langchain": ("teola_plugin.langchain",),
    "llamaindex": ("teola_plugin.llamaindex",),
    "engines": ("teola_plugin.engines",),
    "workflow": ("teola_plugin.workflow",),
    "graph": ("teola_plugin.graph", "teola_plugin.passes"),
    "observe": ("teola_plugin.observe",),
    "simulation": ("teola_plugin.simulation",),
}
"""Public names, and modules with all of theirs, by the page of the reference that shows them."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SOURCE = re.compile(r"((?:src|srcset)=\")(docs/)")
_VARIABLE = re.compile(r"\bTEOLA_[A-Z_]+")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of `docs`."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found, unused-ignore]

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let the links of a page lead to pages of the site."""
    pages = {file.src_uri for file in files}
    return site_links(markdown, page.file.src_uri, pages, config["extra"].get("source_url", ""))


def generated_pages() -> dict[str, str]:
    """Return the texts of the pages that are no files of `docs`, by their paths in the site."""
    pages = {path: (ROOT / name).read_text() for name, path in OUTSIDE.items()}
    for name, shown in REFERENCE.items():
        pages[f"reference/{name}.md"] = "\n".join(f"::: {module}\n" for module in shown)
    pages["reference/command-line.md"] = command_page()
    pages["reference/environment.md"] = environment_page()
    return pages


def site_links(markdown: str, page: str, pages: set[str], source_url: str = "") -> str:
    """Return the text of a page with links that hold on the site.

    Args:
        markdown: The text as it stands in the repository.
        page: Path of the page in the site.
        pages: Paths of all files of the site.
        source_url: Address of the repository's files; links to files that are no pages become text without one.
    """
    folder = "" if page in OUTSIDE.values() else "docs"
    markdown = _SOURCE.sub(r"\1", markdown) if not folder else markdown

    def replaced(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, sign, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        in_repository = posixpath.normpath(posixpath.join(folder, path))
        in_site = OUTSIDE.get(in_repository, in_repository.removeprefix("docs/"))
        if in_site in pages and (in_repository in OUTSIDE or in_repository.startswith("docs/")):
            return f"{image}[{text}]({posixpath.relpath(in_site, posixpath.dirname(page) or '.')}{sign}{anchor})"
        return f"[{text}]({source_url.rstrip('/')}/{in_repository})" if source_url else text

    outside_code = re.split(r"(?ms)(^```.*?^```$)", markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in outside_code)


# ------------------------------------------------------------ commands, environment variables


def command_page() -> str:
    """Return the page of all commands of `teola`, with what `--help` prints."""
    from teola_plugin.cli.main import parser

    sections = ["# Command line", ""]
    for name, command in _commands(parser()):
        sections += [f"## {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(sections)


def _commands(root: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield root.prog, root
    for action in root._actions:  # argparse has no public list of sub-commands
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _commands(command)


def environment_page() -> str:
    """Return the page of the environment variables that the package reads, with the files that do."""
    files_by_name: dict[str, list[str]] = {}
    for folder in ("teola_plugin", "adapters", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not path.is_symlink() and not any(parent.is_symlink() for parent in path.parents):
                for name in dict.fromkeys(_VARIABLE.findall(text)):
                    files_by_name.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    rows = [f"| `{name}` | {', '.join(f'`{one}`' for one in files)} |" for name, files in sorted(files_by_name.items())]
    return "\n".join(["# Environment variables", "", "| variable | read in |", "|---|---|", *rows, ""])
