"""Tests of the page on a phone: only drawings are wider than the screen, and they scroll."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from teola_plugin.observe import html_page

from .sample_traces import PLAIN, stepped, trace

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURES = """<iframe id="f" src="page.html" style="width:390px;height:800px;border:0"></iframe><pre id="o"></pre>
<script>f.onload = () => {
  const page = f.contentDocument, wide = page.documentElement.clientWidth;
  const out = [...page.querySelectorAll("body *")].filter((one) => !one.closest(".scroll, #tip, script, pre, svg"));
  const over = out.filter((one) => one.getBoundingClientRect().right > wide + 1).map((one) => one.className);
  o.textContent = `width ${wide} scroll ${page.documentElement.scrollWidth} over [${over}]`;
}</script>"""


def test_page_has_rules_for_narrow_screens() -> None:
    page = html_page([trace("plain", PLAIN), trace()], labels=["plain", "accelerated"])
    assert 'name="viewport" content="width=device-width' in page and "@media (max-width:" in page
    drawings = re.findall(r'<div class="scroll"><svg', page)
    assert len(drawings) == len(re.findall(r'class="(?:timeline|graph)"', page)) == 4


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_page_is_not_wider_than_the_screen(tmp_path: Path) -> None:
    runs = [trace("a rather long name of what was run", PLAIN), stepped(), trace()]
    (tmp_path / "page.html").write_text(html_page(runs, "One question, with a title that needs two lines"), "utf-8")
    (tmp_path / "frame.html").write_text(MEASURES, "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/frame.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"width (\d+) scroll (\d+) over \[(.*?)\]", shown.split("<pre", 1)[-1])
    assert found is not None, shown[-500:]
    assert int(found[2]) <= int(found[1]) and found[3] == ""
