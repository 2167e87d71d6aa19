"""A hook of MkDocs: adds pages to the site that stand outside `docs` or are made of the code.

* README.md, ARCHITECTURE.md, CHANGELOG.md and CONTRIBUTING.md become pages; links to them follow.
* The reference of Python names is made by mkdocstrings, that of commands, of environment variables and of errors here.
* Links to files that are no pages, such as examples and results, become plain text, unless `extra.source_url` in
  mkdocs.yml says where the repository is.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site by the file in the root of the repository that they show."""
REFERENCE = {
    "python": (
        *("teola_plugin.accelerate", "teola_plugin.uninstall", "teola_plugin.EnginePool", "teola_plugin.errors"),
        *("teola_plugin.Price", "teola_plugin.cluster.config.PoolConfig", "teola_plugin.cluster.deploy.up"),
    ),
    "langchain": ("teola_plugin.langchain",),
    "llamaindex": ("teola_plugin.llamaindex",),
    "engines": (
        "teola_plugin.engines",
        *(f"teola_plugin.engines.base.{name}" for name in "Done EngineLoad Failed Piece Request Result".split()),
        *("teola_plugin.engines.conformance", "teola_plugin.engines.fake", "teola_plugin.engines.profiles.rtx3090"),
    ),
    "workflow": ("teola_plugin.workflow",),
    "graph": ("teola_plugin.graph", "teola_plugin.passes"),
    "observe": ("teola_plugin.observe",),
    "simulation": ("teola_plugin.simulation", "teola_plugin.runtime.virtual_time.run_virtual"),
}
"""Public names, and modules with all of theirs, by the page of the reference that shows them."""
ENVIRONMENT = {
    "TEOLA_DISABLE": "`1` switches the package off: `accelerate` returns the very object that it gets.",
    "TEOLA_QUIET": "`1` hides progress bars.",
    "TEOLA_ADDRESS": "The Ray cluster of the shared pool, `host:port`, unless an argument or `--address` names it.",
    "TEOLA_API_KEY": "The key of the client, in the commands that `teola serve` prints.",
    "TEOLA_VALIDATE_STATE": "`1` checks the schedulers after every event. Tests set it.",
    "TEOLA_DRAFTS": "Set by the package for the processes of vLLM: the settings of drafts.",
    "TEOLA_PARENT": "Set by the package for the processes of vLLM: the process with which they end.",
    "BRAVE_SEARCH_API_KEY": "The key of Brave's web search.",
    "TAVILY_API_KEY": "The key of Tavily's web search.",
    "SEARXNG_URL": "The address of a SearXNG for web searches.",
    "RAY_AUTH_MODE": "`token` or `disabled`: whether the shared pool's Ray cluster asks for a token.",
    "RAY_AUTH_TOKEN": "The token of the shared pool's Ray cluster.",
    "RAY_AUTH_TOKEN_PATH": "The file of that token.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that engines may use.",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of memory for the KV cache of vLLM on CPUs; one by default.",
    "XDG_CACHE_HOME": "The folder in which files of models and logs of engines are kept; `~/.cache` by default.",
    "XDG_DATA_HOME": "The folder in which `teola serve` keeps submitted queries; `~/.local/share` by default.",
}
"""Environment variables that the package reads, and what each is for."""
_VARIABLES = re.compile(rf"\bTEOLA_[A-Z_]+|\b({'|'.join(ENVIRONMENT)})\b")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_SOURCE = re.compile(r"((?:src|srcset)=\")(docs/)")


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
    pages["reference/errors.md"] = errors_page()
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


# ------------------------------------------------------------ commands, environment variables, errors


_EXIT_STATUSES = """| exit status | meaning |
|---|---|
| 0 | done; all is well |
| 1 | the command failed, or a check did (`doctor`, `status`, `compare` with answers that differ) |
| 2 | it cannot be done as asked: unknown command or option, missing file, wrong setting |
| 130, 141 | Ctrl-C; nobody reads the output any more |

Errors go to stderr, in one line each."""


def command_page() -> str:
    """Return the page of all commands of `teola`, with their exit statuses and the output of `--help`."""
    from teola_plugin.cli.main import parser

    sections = ["# Command line", "", _EXIT_STATUSES, ""]
    for name, command in commands(parser()):
        sections += [f"## {name}", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(sections)


def commands(root: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of a command and of those below it."""
    yield root.prog, root
    for action in root._actions:  # argparse has no public list of sub-commands
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from commands(command)


def environment_page() -> str:
    """Return the page of the environment variables that the package reads, with the files that do."""
    files_by_name: dict[str, list[str]] = {name: [] for name in ENVIRONMENT}
    for path in _tool("source_texts").python_files(ROOT):
        for found in dict.fromkeys(match[0] for match in _VARIABLES.finditer(path.read_text(encoding="utf-8"))):
            files_by_name.setdefault(found, []).append(path.relative_to(ROOT).as_posix())
    rows = [
        f"| `{name}` | {ENVIRONMENT.get(name, '')} | {', '.join(f'`{file}`' for file in files)} |"
        for name, files in files_by_name.items()
    ]
    return "\n".join(["# Environment variables", "", "| variable | meaning | named in |", "|---|---|---|", *rows, ""])


def errors_page() -> str:
    """Return the page of the error classes, with every message in the sources and what to do about it."""
    module = importlib.import_module("teola_plugin.errors")
    tree = re.sub(r"(?m)^    ", "", (module.__doc__ or "").split("::\n\n")[1].split("\n\n")[0])
    lines = [
        "# Errors",
        "",
        "Every error of the package says what to do next, in its `hint`. `…` stands for a value.",
        "",
    ]
    lines += ["```text", tree.rstrip(), "```", ""]
    texts = _tool("source_texts").error_texts(ROOT)
    texts = [text for text in texts if len(re.findall("[a-z]", text.message)) > 6]
    for name, error in vars(module).items():
        if not inspect.isclass(error) or error.__module__ != module.__name__:
            continue
        rows = {(text.message, text.hint) for text in texts if text.error == name}
        lines += [f"## {name}", "", inspect.getdoc(error) or "", ""]
        lines += _table(("message", "next"), sorted(rows))
    rows_of_server = {
        (text.status or "400", f"`{text.code}`" if text.code else "", text.message, text.hint)
        for text in texts
        if text.error == "HttpError"
    }
    lines += ["## Errors of the server", "", "`teola serve` answers with these statuses and codes.", ""]
    return "\n".join(lines + _table(("status", "`code`", "message", "next"), sorted(rows_of_server)))


def _tool(name: str) -> Any:
    """Import another module of this folder. MkDocs loads this file by its path, so the folder may be unknown."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table; none if it has no rows."""
    if not rows:
        return []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(_cell(text) for text in row)} |" for row in rows), ""]


def _cell(text: str) -> str:
    """Return a text as the cell of a table: nothing in it is markup but code in backticks."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text).strip(" |"))
    return "".join(
        part.replace("|", "&#124;") if part.startswith("`") else re.sub(r"([\\*_\[\]<>|])", r"\\\1", part)
        for part in parts
    )
