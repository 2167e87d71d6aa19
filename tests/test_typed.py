"""Tests that programs of users type-check with strict mypy, and that wrong ones are refused.

They check the programs of `tests/typed` and the code blocks of the documents in one run of mypy. The run uses the cache
that `make types` leaves, and takes as long as that without it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.documents import GIVEN, TUTORIALS, WITH_CODE, code, saved_files

ROOT = Path(__file__).parents[1]
REFUSED = ROOT / "tests" / "typed" / "refused.py"
LENIENT = "# mypy: allow-redefinition, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls\n"
"""Documents need no annotations."""


@pytest.fixture(scope="module")
def mypy_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the errors of each file, as mypy writes them."""
    folder = tmp_path_factory.mktemp("blocks")
    for document in WITH_CODE:
        text = "\n\n".join([LENIENT + GIVEN, *code(document)])
        (folder / f"{re.sub(r'[^a-z]', '_', document.stem.lower())}_md.py").write_text(text)
    for name, text in (file for tutorial in TUTORIALS for file in saved_files(tutorial).items()):
        assert not (folder / name).exists(), f"two tutorials write {name}"
        (folder / name).write_text(LENIENT + text)
    programs = [str(one.relative_to(ROOT)) for one in sorted((ROOT / "tests" / "typed").glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context", *programs, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr  # of what it has to refuse
    made: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if (error := re.match(r"(\S+?\.py):\d+: error: ", line)) is not None:
            made.setdefault(Path(error[1]).name, []).append(line)
    return made


def test_valid_user_code_type_checks(mypy_errors: dict[str, list[str]]) -> None:
    assert [line for name, lines in mypy_errors.items() if name != REFUSED.name for line in lines] == []


def test_wrong_user_code_fails_on_the_marked_lines(mypy_errors: dict[str, list[str]]) -> None:
    lines = REFUSED.read_text().splitlines()
    wanted = {(at, mark[1]) for at, line in enumerate(lines, 1) if (mark := re.search(r"# refused: ([\w-]+)$", line))}
    errors = (re.search(r":(\d+): error: .*\[([\w-]+)\]$", line) for line in mypy_errors[REFUSED.name])
    assert {(int(one[1]), one[2]) for one in errors if one is not None} == wanted
    assert len(wanted) > 30


def test_every_folder_with_programs_is_checked() -> None:
    """A benchmark that imports what has moved is found before somebody runs it."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    linked = {one.resolve().name for one in (ROOT / "teola_plugin").iterdir() if one.is_symlink()}
    folders = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")} - linked - {"tests"}
    assert {"benchmarks", "examples", "tools"} <= folders <= set(checked)
