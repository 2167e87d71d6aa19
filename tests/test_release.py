"""Tests of `make release-check`, which names reasons against a release, and of links in the published README."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import MEASURED_CODE
from tools import release

ROOT = Path(__file__).parents[1]
PAGE = "[public_apps.json](public_apps.json), `python -m ...`: 2 cores, load 0.8 before the run, commit abc1234."


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository with one commit."""
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "one.py").write_text("ONE = 1\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "A change")
    return git(folder, "rev-parse", "--short", "HEAD")


def problems_of(environment: dict[str, Any], page: str = PAGE) -> str:
    return "\n".join(release.headline_problems("public_apps", environment, page))


def test_headline_of_this_code_passes(checkout: Path) -> None:
    measured = git(checkout, "rev-parse", "--short", "HEAD")
    (checkout / "README.md").write_text("The figure.\n")
    commit(checkout)
    assert problems_of({"commit": measured, "load_1m": 0.8}) == ""


def test_headline_measured_on_other_code_is_a_problem(checkout: Path) -> None:
    measured = git(checkout, "rev-parse", "--short", "HEAD")
    (checkout / "adapters" / "one.py").write_text("ONE = 2\n")
    commit(checkout)
    found = problems_of({"commit": measured, "load_1m": 0.8})
    assert f"measured at {measured}; 1 files have changed since, such as adapters/one.py" in found


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"load_1m": 0.8}, "does not name the commit"),
        ({"commit": "none", "load_1m": 0.8}, "does not name the commit"),
        ({"commit": "abc1234 with changes", "load_1m": 0.8}, "changes that were not committed"),
        ({"commit": "abc1234", "load_1m": 0.8}, "no commit of this repository"),
        ({"commit": "abc1234"}, "does not tell the load"),
        ({"commit": "abc1234", "load_1m": 3.3}, "does not state the load before public_apps ran, 3.3"),
    ],
)
def test_headline_without_its_conditions_is_a_problem(
    checkout: Path, environment: dict[str, Any], problem: str
) -> None:
    assert problem in problems_of(environment)


def test_load_after_the_run_is_no_condition(checkout: Path) -> None:
    measured = git(checkout, "rev-parse", "--short", "HEAD")
    page = PAGE.replace("before the run", "after the run")
    assert "does not state the load" in problems_of({"commit": measured, "load_1m": 0.8}, page)


def test_uncommitted_changes_are_found(checkout: Path) -> None:
    (checkout / "adapters" / "one.py").write_text("ONE = 2\n")
    assert release._git("status", "--porcelain") == " M adapters/one.py"


# ------------------------------------------------------------ this repository


def test_measured_code_is_a_subset_of_the_released_code() -> None:
    assert set(MEASURED_CODE) <= set(release.MEASURED)


def test_version_is_consistent_and_dated() -> None:
    assert list(release.version_problems()) == []


def test_changelog_without_a_date_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teola_plugin").mkdir()
    (tmp_path / "teola_plugin" / "__init__.py").write_text('__version__ = "1.2.2"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n" + "- a line\n" * 60)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    found = "\n".join(release.version_problems())
    assert "teola_plugin.__version__ is not 1.2.3" in found
    assert "begins with '[Unreleased]'" in found
    assert "has 63 lines" in found


def test_release_needs_the_address_of_its_page() -> None:
    assert any("SOURCE_URL" in problem for problem in release.problems(""))
    assert not any("SOURCE_URL" in problem for problem in release.problems("https://example.org/it"))


def test_all_metadata_addresses_use_one_placeholder() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(urls)
    assert all(url.startswith(release.PLACEHOLDER) for url in urls.values())


def test_readme_links_point_to_files_of_the_release() -> None:
    text = '[use](docs/using.md#a) [top](#top) [paper](https://a.org/b) ![x](docs/x.svg) <img src="docs/y.svg">'
    url = "https://example.org/it"
    assert release.absolute_links(text, url, "v1.0.0") == (
        f"[use]({url}/blob/v1.0.0/docs/using.md#a) [top](#top) [paper](https://a.org/b) "
        f'![x]({url}/raw/v1.0.0/docs/x.svg) <img src="{url}/raw/v1.0.0/docs/y.svg">'
    )


def test_no_link_of_the_readme_stays_relative() -> None:
    text = release.absolute_links((ROOT / "README.md").read_text(), "https://example.org/it", "v1.0.0")
    assert re.findall(r"\]\((?!https?:|#)[^)]+\)|(?:src|srcset)=\"(?!https?:)", text) == []


def test_copy_of_the_sources_has_the_address(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    release.copy_sources(tmp_path, "https://example.org/it")
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Issues"] == "https://example.org/it/issues"
    assert (tmp_path / "teola_plugin" / "adapters").is_symlink()
    assert release.PLACEHOLDER in (ROOT / "pyproject.toml").read_text()
