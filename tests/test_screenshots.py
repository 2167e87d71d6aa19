"""Tests of the pictures in docs/images, and of the script that makes them if a browser is installed."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LARGEST = 150_000
"""Bytes: everybody who clones the repository loads them."""


@pytest.fixture
def screenshots(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "tools" / "screenshots.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "screenshots", module)
    spec.loader.exec_module(module)
    return module


def size(picture: Path) -> tuple[int, int]:
    """Return width and height of a PNG, in pixels."""
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_every_screenshot_exists_and_is_small(screenshots: Any) -> None:
    for name, shapes in screenshots.SHAPES.items():
        for scheme, shape in shapes.items():
            picture = IMAGES / f"{name}-{scheme}.png"
            assert size(picture) == (shape.width, shape.height), "run python tools/screenshots.py docs/images"
            assert picture.stat().st_size < LARGEST


def test_missing_browser_names_the_install_command(
    screenshots: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["screenshots.py", str(tmp_path / "images")])
    assert screenshots.main() == 1
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and "apt-get install chromium" in stderr
    assert not (tmp_path / "images").exists()


def test_demo_output_is_rendered_unchanged(screenshots: Any, tmp_path: Path) -> None:
    page = screenshots.terminal(tmp_path, "$ teola demo\n  plain       ██ 1 < 2 s\n  1.50x faster, same answer\n")
    text = page.read_text()
    assert '<span class="plain">██</span> 1 &lt; 2 s' in text and "<b>  1.50x faster, same answer</b>" in text


def test_screenshots_are_taken_light_dark_and_for_phones(screenshots: Any, tmp_path: Path) -> None:
    chromium = screenshots.browser()
    if chromium is None:
        pytest.skip(screenshots.MISSING)
    page = screenshots.terminal(tmp_path, "$ teola demo\n")
    made = {}
    for scheme, shape in screenshots.SHAPES["demo"].items():
        made[scheme] = tmp_path / f"{scheme}.png"
        screenshots.shoot(chromium, page, made[scheme], shape)
        assert size(made[scheme]) == (shape.width, shape.height)
    assert made["light"].read_bytes() != made["dark"].read_bytes(), "the page is asked for its colour scheme"


def test_every_screenshot_is_used_in_a_document(screenshots: Any) -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in IMAGES.glob("*.png") if f"images/{path.name}" not in text] == []
