"""Puts trained models where an installed `teola demo` finds them: `python -m examples.demo_model.install FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from examples.demo_model.model import make_portable
from teola_plugin.engines import model_cache as bundled

KEPT = ("*.json", "*.safetensors", "*.jinja")


def install(trained: Path) -> None:
    """Copies `demo-llm` and `demo-reranker` from `trained`; what is not there stays as it is."""
    for name in ("demo-llm", "demo-reranker"):
        source, target = trained / name, bundled.FOLDER / name
        if not source.is_dir():
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in (found for pattern in KEPT for found in sorted(source.glob(pattern))):
            shutil.copyfile(path, target / path.name)
        make_portable(target)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
