"""Tests of `tools/check_readability.py`: our sources pass, and each measure finds what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_readability as check

ROOT = Path(__file__).resolve().parents[1]


def write(root: Path, **sources: str) -> Path:
    """Write the sources as modules of the package `server`, and return the root."""
    (root / "server").mkdir(exist_ok=True)
    for name, source in sources.items():
        (root / "server" / f"{name}.py").write_text(source)
    return root.resolve()


LONG_FUNCTION = '''def add(number: int) -> int:
    """Return the number after ten more."""
    number += 1
    number += 2
    number += 3
    number += 4
    return number
'''
FIELDS = "\n".join(f"    is_{letter}: bool" for letter in "abcdef")
LITTLE_CLASS = "class Row:\n    pass\n"
BROKEN = {
    "vague names": {"broken": f"{LONG_FUNCTION}found = 1\n"},
    "private words": {"broken": f"{LONG_FUNCTION}early_calls = 1\n"},
    "fragment docstrings": {"broken": LONG_FUNCTION.replace("Return the", "Whether the")},
    "long files": {"broken": LONG_FUNCTION + "number = 1\n" * 600},
    "classes with many booleans": {"broken": f"{LONG_FUNCTION}class Flags:\n{FIELDS}\n"},
    "repeated class names": {"broken": LITTLE_CLASS, "second": LITTLE_CLASS, "third": "class _Row:\n    pass\n"},
    "lines of a function (median)": {"broken": "def one() -> int:\n    return 1\n"},
}


def test_sources_pass_the_readability_check() -> None:
    assert check.problems(ROOT) == []


def test_sources_of_six_modules_without_any_finding_pass(tmp_path: Path) -> None:
    assert check.problems(write(tmp_path, **{f"module{i}": LONG_FUNCTION for i in range(6)})) == []


@pytest.mark.parametrize("measure", BROKEN)
def test_bad_sample_is_reported_with_file_and_line(tmp_path: Path, measure: str) -> None:
    title, *places = check.problems(write(tmp_path, **BROKEN[measure]))
    assert title.startswith(f"{measure}: ")
    assert places[0].startswith("  server/broken.py:")
    assert int(places[0].split(":")[1]) > 0


def test_number_of_source_files_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "MAX_FILES", 1)
    root = write(tmp_path, one=LONG_FUNCTION, two=LONG_FUNCTION)
    assert check.problems(root) == ["files: 2 in all packages; at most 1"]


def test_package_behind_a_link_is_counted_once(tmp_path: Path) -> None:
    root = write(tmp_path, one=LONG_FUNCTION)
    (root / "teola_plugin").mkdir()
    (root / "teola_plugin" / "server").symlink_to(root / "server")
    assert [path.name for path in check.python_files(root)] == ["one.py"]


def test_every_kind_of_name_is_checked() -> None:
    source = """
class Held:
    def told(self, asked, *given, **made):
        self.kept = why = 1
        try:
            pass
        except ValueError as ended:
            pass
"""
    counts = check.Counts()
    check.count_file("sample.py", source, counts)
    names = {text for _, _, text in counts.places["vague names"]}
    assert names == {"Held", "told", "asked", "given", "made", "kept", "why", "ended"}


def test_command_prints_measures_above_their_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, **BROKEN["vague names"])
    monkeypatch.setattr(check.sys, "argv", ["check_readability.py", str(root)])
    assert check.main() == 1
    assert "server/broken.py:8: found" in capsys.readouterr().out
