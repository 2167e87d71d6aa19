#!/usr/bin/env python3
"""Build what is published, and check that it may be published.

`make release` writes to out/dist: the source distribution, the wheel made of it, bills of materials (CycloneDX) of two
installations, and the checksums of all of these. `make release-check` says what speaks against a release. Its exit
status is 1 if anything does.

    make release SOURCE_URL=https://github.com/someone/teola-plugin
    make release-check SOURCE_URL=https://github.com/someone/teola-plugin

Without SOURCE_URL the distributions are for trying out only: their metadata has a placeholder instead of addresses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIST = ROOT / "out" / "dist"
PLACEHOLDER = "https://teola-plugin.invalid"
"""Stands for the address of the project's page in pyproject.toml."""
MAX_CHANGELOG_LINES = 60
HEADLINE = ("public_apps", "real_engines")
"""The results of benchmarks that the headline of the README is made of."""
MEASURED = (
    "teola_plugin",
    "adapters",
    "tracer",
    "server",
    "benchmarks",
    ":!benchmarks/results",
    "requirements/cpu.lock",
)
"""Paths, as git takes them: a figure is out of date once one of them has changed."""
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s]+)(\))|((?:src|srcset)=\")(?!\w+:)([^\"]+)(\")")


# ------------------------------------------------------------ building


def build(source_url: str) -> list[Path]:
    """Build everything into an empty out/dist, and return the files.

    Raise `subprocess.CalledProcessError` if a step fails, such as twine's check of the metadata.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder), source_url)
        _run("build", "--no-isolation", "--outdir", str(DIST), folder)
    distributions = sorted(map(str, DIST.iterdir()))
    _run("twine", "check", "--strict", *distributions)
    write_bills(next(DIST.glob("*.whl")))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    return sorted(DIST.iterdir())


def copy_sources(folder: Path, source_url: str) -> None:
    """Copy the files that git tracks. In the copy, metadata and README lead to `source_url`, unless it is empty."""
    for name in _git("ls-files").splitlines():
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    if source_url:
        project = folder / "pyproject.toml"
        project.write_text(project.read_text().replace(PLACEHOLDER, source_url))
    readme = folder / "README.md"
    readme.write_text(absolute_links(readme.read_text(), source_url or PLACEHOLDER, f"v{version()}"))


def absolute_links(text: str, source_url: str, tag: str) -> str:
    """Return a README whose links to files of the repository work on a package index, too.

    Args:
        text: The README.
        source_url: The address of the repository.
        tag: The tag of the release; links lead to the files as they are at it.
    """

    def absolute(found: re.Match[str]) -> str:
        before, target, after = found.groups()[:3] if found[1] else found.groups()[3:]
        kind = "raw" if target.endswith((".svg", ".png")) else "blob"
        return f"{before}{source_url}/{kind}/{tag}/{target}{after}"

    return _LINK.sub(absolute, text)


def write_bills(wheel: Path) -> None:
    """Write two bills of materials: of the wheel with what it depends on, and of all packages that tests run with."""
    stem = wheel.name.partition("-py3")[0]
    project = str(ROOT / "pyproject.toml")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "pip", "setuptools"], check=True)
        _run("cyclonedx_py", "environment", "--pyproject", project, "-o", str(DIST / f"{stem}.cdx.json"), python)
    lock, bill = str(ROOT / "requirements" / "cpu.lock"), str(DIST / f"{stem}-tested.cdx.json")
    _run("cyclonedx_py", "requirements", "--pyproject", project, "-o", bill, lock)


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.rstrip()


# ------------------------------------------------------------ checks


def problems(source_url: str) -> Iterator[str]:
    """Yield a sentence for each thing that speaks against a release of the commit that is checked out."""
    yield from version_problems()
    if not source_url:
        yield "SOURCE_URL is not set, so the metadata has no address. Next: make release-check SOURCE_URL=https://..."
    if changed := _git("status", "--porcelain"):
        names = ", ".join(line[3:] for line in changed.splitlines())
        yield f"Files differ from the commit: {names}. Next: commit them."
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in HEADLINE:
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        yield from headline_problems(name, result["environment"], page)


def version() -> str:
    """Return the version in pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def version_problems() -> Iterator[str]:
    """Yield what is wrong with the version: it stands in pyproject.toml, in the package and in the changelog."""
    ours, package = version(), (ROOT / "teola_plugin" / "__init__.py").read_text()
    if f'__version__ = "{ours}"' not in package:
        yield f"teola_plugin.__version__ is not {ours}, the version in pyproject.toml."
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = next(iter(re.findall(r"(?m)^## (.*)$", changelog)), "")
    if not re.fullmatch(rf"\[{re.escape(ours)}\] - \d{{4}}-\d\d-\d\d", newest):
        yield f"CHANGELOG.md begins with {newest!r}. Next: write [{ours}] and the date."
    if changelog.count("\n") > MAX_CHANGELOG_LINES:
        yield f"CHANGELOG.md has {changelog.count(chr(10))} lines; {MAX_CHANGELOG_LINES} are allowed."


def headline_problems(name: str, environment: dict[str, Any], page: str) -> Iterator[str]:
    """Yield why a result may not be the headline: it is of other code, or nobody says what else the machine did.

    Args:
        name: The result, which is benchmarks/results/NAME.json.
        environment: The environment that the result names.
        page: The page of results.
    """
    again = f"Next: python -m benchmarks.kept {name}"
    measured = str(environment.get("commit", ""))
    if not measured or measured == "none":
        yield f"{name}.json does not name the commit that was measured. {again}"
    elif measured.endswith("with changes"):
        yield f"{name}.json was measured with changes that were not committed ({measured}). {again}"
    elif not _git("cat-file", "-t", measured):
        yield f"{name}.json was measured at {measured}, which is no commit of this repository. {again}"
    elif changed := _git("diff", "--name-only", measured, "HEAD", "--", *MEASURED):
        files = changed.splitlines()
        count = f"{len(files)} files have changed since, such as {files[0]}"
        yield f"{name}.json was measured at {measured}; {count}. {again}"
    load = environment.get("load_1m")
    if load is None:
        yield f"{name}.json does not tell the load before the run. {again}"
    elif not re.search(rf"{name}\.json[^\n]* load {load:.1f} before the run", page):
        yield f"docs/benchmarks.md does not state the load before {name} ran, {load:.1f}, beside {name}.json."


def main() -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(description="Build what is published, and check that it may be published.")
    parser.add_argument("command", choices=("build", "check"))
    parser.add_argument("--source-url", default="", help="the address of the project's page")
    options = parser.parse_args()
    source_url = options.source_url.rstrip("/")
    if options.command == "build":
        print("release: " + ", ".join(path.name for path in build(source_url)) + f" in {DIST.relative_to(ROOT)}")
        return 0
    found = list(problems(source_url))
    print("\n".join(f"release: {problem}" for problem in found) or f"release: nothing speaks against {version()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
