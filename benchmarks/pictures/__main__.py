"""Draws what the committed results say: of each picture `NAME.svg` and `NAME-dark.svg`.

python -m benchmarks.pictures docs/images
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.pictures.drawings import DRAWN
from benchmarks.themes import THEMES, themed

RESULTS = Path(__file__).parents[1] / "results"


def drawn(name: str, theme: str) -> str | None:
    """None where the result is not there."""
    result, draw = DRAWN[name]
    path = RESULTS / f"{result}.json"
    return draw(json.loads(path.read_text())).svg(theme) if path.exists() else None


def main(folder: Path) -> None:
    for name in DRAWN:
        for theme in THEMES:
            if (picture := drawn(name, theme)) is not None:
                themed(folder / f"{name}.svg", theme).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
