"""Tests of the HTML page of a trace: self-contained, well-formed, safe, complete."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from teola_plugin.observe import html_page
from teola_plugin.observe.html import shares
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.steps import Step
from teola_plugin.observe.svg import _Bar, _Scale, ticks

from .sample_traces import FAST, PLAIN, stepped, trace

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def classes(self, tag: str, word: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and word in (a.get("class") or "").split()]


def test_page_loads_no_external_resources() -> None:
    text = html_page([trace()])
    page = Page(text)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert not any(name in attrs for _, attrs in page.tags for name in ("src", "href"))
    assert {m for m in re.findall(r"url\(([^)]*)\)", text)} <= {"#head", "#head-critical", "#hatch"}
    assert any("default-src 'none'" in (a.get("content") or "") for t, a in page.tags if t == "meta")


def test_every_primitive_is_in_graph_and_timeline_and_has_facts() -> None:
    page = Page(html_page([trace("plain", PLAIN), trace()]))
    facts = json.loads("".join(page.text["script"][:1]))
    for index, rows in enumerate((PLAIN, FAST)):
        for number, row in enumerate(rows):
            where = f"{index}:{row[0]}"
            assert any(a.get("data-p") == where for a in page.classes("g", "node"))
            assert any(a.get("data-k") == f"{index}/{number}" for a in page.classes("g", "span"))
            assert facts[where][0] == ["", row[0]]


def test_critical_path_is_marked_in_graph_timeline_and_table() -> None:
    found = trace()
    page = Page(html_page([found]))
    path = [f"0:{step.span.primitive}" for step in found.critical_path() if not step.is_code]
    assert {a["data-p"] for a in page.classes("g", "node") if "critical" in str(a["class"])} == set(path)
    assert {a["data-p"] for a in page.classes("g", "span") if "critical" in str(a["class"])} == set(path)
    least = 0.005 * found.seconds
    long = [f"0:{step.span.primitive}" for step in found.critical_path() if step.total >= least]
    assert [a["data-p"] for t, a in page.tags if t == "tr" and "data-p" in a] == long and "0:your code" in long
    assert "1 more, of less than 0.5 % each" in page.text["td"]
    assert len(page.classes("path", "critical")) >= len(path) - 1


def test_edges_are_styled_by_their_kind() -> None:
    page = Page(html_page([trace()]))
    order = [e for e in trace().view().edges if e[2] == "order"]
    assert order and len(page.classes("path", "order")) == len(order)
    assert {a["data-p"] for a in page.classes("g", "node") if "speculative" in str(a["class"])} == {
        "0:lookahead.embedding",
        "0:lookahead.searching",
    }


def test_several_traces_share_a_scale_and_show_the_ratio() -> None:
    text = html_page([trace("plain", PLAIN), trace()], labels=["as it was", "accelerated"])
    assert "1.54× faster" in text and "as it was" in text
    ends = [float(str(a["x1"])) for a in Page(text).classes("line", "end")]
    assert (ends[0] - 132) / (ends[1] - 132) == pytest.approx(3.33 / 2.16, rel=1e-3)
    assert "1.54× slower" in html_page([trace(), trace("plain", PLAIN)])


def test_page_shows_the_median_and_number_of_runs() -> None:
    """The page shows the median run, not the last one: two runs are faster or slower than it."""
    runs = [dataclasses.replace(trace(), query_id=f"q{i}", ended=100 + seconds) for i, seconds in enumerate((9, 3, 4))]
    plain = [dataclasses.replace(trace("plain", PLAIN), ended=100 + seconds) for seconds in (8.0, 6.0, 30.0)]
    page = html_page([*plain, *runs], labels=["plain"] * 3 + ["accelerated"] * 3)
    assert "2.00× faster" in page and "median of 3 runs, 3.00 s to 9.00 s" in page
    assert "8.00 s, the run nearest to the median of 3" in page and "4.00 s, the run nearest" in page
    assert Page(page).text["td"].count("8.00 s") >= 1 and "30.0 s" in page
    alone = html_page(runs, labels=["all"] * 3)
    assert Page(alone).text["dd"][0] == "4.00 s" and "median of 3 runs" in alone
    assert "median" not in html_page([trace("plain", PLAIN), trace()], labels=["plain", "accelerated"])


def test_headline_uses_the_given_seconds() -> None:
    """A trace may be of another run, e.g. on engines, of what was measured without."""
    page = html_page([trace("plain", PLAIN), trace()], labels=["plain", "fast"], seconds=[12.0, 6.0])
    assert "12.0 s" in page and "2.00× faster" in page
    with pytest.raises(ValueError, match="1 seconds were given for 2 traces"):
        html_page([trace("plain", PLAIN), trace()], seconds=[1.0])


def test_shares_of_the_time_add_up() -> None:
    found = trace()
    assert sum(seconds for _, _, seconds in shares(found)) == pytest.approx(found.seconds)
    bars = [a for a in re.findall(r'<div class="shares">(.*?)</div>', html_page([found]))]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bars[0])]
    assert sum(widths) == pytest.approx(100, abs=0.1)


def test_generation_span_is_one_bar_and_marks_two_nodes() -> None:
    base = trace("plain", PLAIN[3:5], tail=0.0)
    whole = dataclasses.replace(
        base.spans[0],
        primitive="expand",
        kind="GENERATION",
        done=base.spans[1].done,
        written=7,
        also=("expand.prefilling", "expand.decoding"),
    )
    page = Page(html_page([dataclasses.replace(base, spans=(whole,))]))
    assert [a["data-k"] for a in page.classes("g", "span") if a["data-k"] == "0/0"] == ["0/0"]
    marked = {a["data-p"] for a in page.classes("g", "node") if "critical" in str(a["class"])}
    assert marked == {"0:expand.prefilling", "0:expand.decoding"}
    facts = json.loads(page.text["script"][0])
    assert facts["0:expand.decoding"] == facts["0/0"] and ["tokens written", "7"] in facts["0/0"]


def test_steps_have_lanes_above_the_engines_and_facts() -> None:
    found = stepped()
    page = Page(html_page([found]))
    bars = page.classes("g", "step")
    assert {a["data-k"] for a in bars} == {f"0/s{step.id}" for step in found.steps}
    assert [a["data-k"] for a in bars if "speculative" in str(a["class"])] == ["0/s4"], "the tool ran early"
    facts = {key: dict(rows) for key, rows in json.loads(page.text["script"][0]).items()}
    assert facts["0/s1"] | {"kind": "superstep", "nodes": "grade, search", "ran": "500 ms"} == facts["0/s1"]
    assert facts["0/s4"] | {"in": "node grade", "early": "yes", "outcome": "done"} == facts["0/s4"]
    assert facts["0/s5"]["ran"] == "did not end" and facts["0/s3"]["outcome"] == "failed"
    assert facts["0:grade.decoding"]["step"] == "node grade" and "step" not in facts["0:lookahead"]
    lanes = {a["data-k"]: _lane(html_page([found]), str(a["data-k"])) for a in bars}
    assert lanes["0/s1"] == lanes["0/s5"] < min(lanes["0/s2"], lanes["0/s3"]) and lanes["0/s2"] != lanes["0/s3"]
    assert max(lanes["0/s2"], lanes["0/s3"]) < lanes["0/s4"] < _lane(html_page([found]), "0/0")
    assert not Page(html_page([trace()])).classes("svg", "step"), "none told of, none in the legend"


def _lane(page: str, key: str) -> float:
    """Return the y coordinate of the bar with this key."""
    return float(re.findall(rf'data-k="{key}"><rect x="[\d.]+" y="([\d.]+)"', page)[0])


def test_hostile_names_are_escaped() -> None:
    nasty = "</script><script>alert(1)</script>\"'&"
    base = trace("plain", PLAIN)
    span = dataclasses.replace(base.spans[0], primitive=nasty, kind=nasty, engine=nasty, detail=(("prompt", nasty),))
    steps = (Step(1, nasty, nasty, base.started, base.ended, outcome=nasty, facts=((nasty, nasty),)),)
    found = dataclasses.replace(
        base, spans=(span,), graph=None, app=nasty, graph_text=nasty, query_id=nasty, steps=steps
    )
    page = Page(html_page([found], title=nasty))
    assert sum(t == "script" for t, _ in page.tags) == 2
    assert page.text["h1"] == [nasty]
    assert json.loads(page.text["script"][0])["0/0"][-1] == ["prompt", nasty]


@pytest.mark.parametrize("rows", [(), PLAIN[:1]])
def test_small_and_empty_traces_have_a_page(rows: tuple[object, ...]) -> None:
    Page(html_page([trace("small", rows)]))  # type: ignore[arg-type]
    Page(html_page([QueryTrace("q", "", 1.0, 1.0), QueryTrace("q", "", 1.0, 1.0)]))
    Page(html_page([]))


def test_span_that_never_ended_is_drawn_to_the_end() -> None:
    base = trace("plain", PLAIN)
    open_span = dataclasses.replace(base.spans[-1], done=None, outcome="cancelled")
    bar = _Bar(open_span, 0, base, _Scale(base.started, base.seconds))
    assert bar.end == pytest.approx(1240 - 18)
    Page(html_page([dataclasses.replace(base, spans=(*base.spans[:-1], open_span))]))


def test_prompts_are_absent_unless_recorded() -> None:
    base = trace("plain", PLAIN)
    assert "secret" not in html_page([base])
    span = dataclasses.replace(base.spans[0], detail=(("prompt", "secret"),))
    assert "secret" in html_page([dataclasses.replace(base, spans=(span,))])


@pytest.mark.parametrize("total", [3e-6, 0.0042, 0.31, 1.0, 2.16, 59.0, 4000.0])
def test_ticks_are_few_round_values(total: float) -> None:
    found = ticks(total, 10)
    assert found[0] == 0 and 4 <= len(found) <= 11 and found[-1] <= total * 1.001
