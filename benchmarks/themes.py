"""Colours of pictures, light and dark: those of the HTML page, written out, since not everything that shows an SVG
knows style variables."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

THEMES = ("light", "dark")
SANS, MONO = "system-ui, 'Segoe UI', Arial, sans-serif", "ui-monospace, Menlo, Consolas, monospace"


def colours(theme: str) -> dict[str, str]:
    """Name -> colour, of the HTML page's theme."""
    page = resources.files("teola_plugin.observe").joinpath("page.css").read_text()
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    found = {"light": light, "dark": dark.partition("\n}")[0]}[theme]
    return dict(re.findall(r"--(\w+): (#\w+)", found))


def painted(style: str, theme: str) -> str:
    """The style with every name in capitals replaced by its colour."""
    known = colours(theme)
    return re.sub(r"\b[A-Z]{2,}\b", lambda word: known.get(word[0].lower(), word[0]), style)


def themed(target: Path, theme: str) -> Path:
    """Where the picture lies: `name.svg`, or `name-dark.svg`."""
    return target if theme == "light" else target.with_stem(f"{target.stem}-{theme}")
