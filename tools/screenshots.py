"""Pictures of what users look at, for docs/images: the page of a trace, those of `teola compare` and `teola serve`, the
demo's output.

Each is light, dark, and as wide as a phone. Wants a Chromium on the machine, and no package for it.

    python tools/screenshots.py docs/images            # all; `teola demo` takes two minutes
    python tools/screenshots.py docs/images --only trace compare
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MISSING = (
    "no Chromium was found. Next: apt-get install chromium, or brew install --cask chromium, or set CHROMIUM to the "
    "path of a Chromium, Chrome or Edge"
)


@dataclass(frozen=True)
class Shape:
    """Of one picture: pixels, and the colour scheme that the page is asked for."""

    width: int
    height: int
    dark: bool = False


def shapes(wide: int, narrow: int) -> dict[str, Shape]:
    """Of one page, by the heights that it takes."""
    return {"light": Shape(1240, wide), "dark": Shape(1240, wide, dark=True), "phone": Shape(390, narrow)}


SHAPES = {
    "trace": shapes(900, 844),
    "compare": shapes(620, 280),
    "queries": shapes(480, 480),
    "pool": shapes(640, 700),
    "try": shapes(820, 844),
    "waiting": shapes(700, 760),
    "demo": shapes(640, 844),
}
QUESTIONS = ["What do lambs eat?", "When are sheep shorn?", "Who counts them?"]
APP = """
import asyncio, time
from langchain_core.language_models import SimpleChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

class Model(SimpleChatModel):
    _llm_type = "stand-in"
    def _call(self, messages, *args, **kwargs):
        return f"({messages[-1].content})"
    def _generate(self, *args, **kwargs):
        time.sleep(0.2)
        return super()._generate(*args, **kwargs)
    async def _agenerate(self, *args, **kwargs):
        await asyncio.sleep(0.2)
        return super()._generate(*args, **kwargs)

def ask(prompt):
    return ChatPromptTemplate.from_template(prompt) | Model() | StrOutputParser()

chain = (
    RunnablePassthrough.assign(summary=ask("Sum up: {text}"))
    | RunnablePassthrough.assign(risks=ask("Name the risks: {text}"))
    | RunnablePassthrough.assign(tone=ask("Describe the tone: {text}"))
)
"""
POOL = """
engines:
  llm: {kind: fake, options: {machine: rtx3090}}
  embedder: {kind: fake, options: {machine: rtx3090}}
  reranker: {kind: fake, options: {machine: rtx3090}}
  store: {kind: fake, options: {machine: rtx3090}}
server: {port: 0, store: memory, log: "off", joined_idle: 0.5}
"""
ASKING = """
import sys, time
from teola_plugin.server.client import QueryClient, joining

with QueryClient(base_url=sys.argv[1], timeout=60, trust_env=False) as client:
    def ask(question, **more):
        message = {"role": "user", "content": question}
        client.post("/v1/chat/completions", json={"model": "llm", "messages": [message], "max_tokens": 24}, **more)

    for number in range(5):
        with joining(f"visit-{number}", app="search", goal=8):
            client.post("/v1/embeddings", json={"model": "embedder", "input": ["What do lambs eat?"]})
            client.post("/v1/rerank", json={"model": "reranker", "query": "lambs", "documents": ["grass", "oats"]})
            ask("What do lambs eat?")
        ask("Who counts the sheep?", headers={"X-Teola-App": "support", "X-Teola-Goal": "5"})
time.sleep(1.5)  # until the joined ones are over
"""
FARM = """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from teola_plugin.workflow import PER_QUERY, Indexing, Searching, Synthesis, Workflow

class State(TypedDict, total=False):
    request: str
    reply: str

async def order(state: State) -> State:
    leave = interrupt({"question": "Order two tons of oats?", "price": "412.00 EUR", "from": "Mill & Sons"})
    return {"reply": f"Told: {leave}"}

def desk():
    made = StateGraph(State)
    made.add_node("order", order)
    made.add_edge(START, "order")
    made.add_edge("order", END)
    return made.compile()

def reading():
    found = Indexing("index", chunk_size=256, collection=PER_QUERY) >> Searching("found", k=4, collection=PER_QUERY)
    return Workflow("reading", found >> Synthesis("answer", context="found", mode="compact", max_tokens=256))
"""
APPS = """
apps:
  reading: {object: "farm:reading", description: "answers from your documents", example: "What do lambs eat?"}
  desk: {object: "farm:desk", input: request, output: reply, checkpoints: true}
"""
SUBMITTING = """
import sys
from teola_plugin.server.client import TeolaClient

with TeolaClient(sys.argv[1], trust_env=False) as client:
    print(client.wait(client.submit("desk", "Order oats for the winter.").id).id)
"""
TERMINAL = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root { color-scheme: light dark } body { margin: 0; padding: 18px 22px; background: light-dark(#fff, #16181b) }
pre { margin: 0; font: 13px/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
color: light-dark(#1c1f23, #e6e8ea) } @media (max-width: 600px) { pre { font-size: 9.5px } body { padding: 12px } }
.plain { color: light-dark(#a9b0ba, #606973) } .accelerated { color: light-dark(#4546a6, #8d95f7) }
</style><pre>BODY</pre>
"""


def browser() -> str | None:
    """A Chromium of this machine; `CHROMIUM` in the environment goes first."""
    wanted = os.environ.get("CHROMIUM")
    found = [shutil.which(name) for name in ((wanted,) if wanted else BROWSERS)]
    return next((path for path in found if path), None)


def shoot(chromium: str, page: Path, target: Path, shape: Shape) -> None:
    """Writes a PNG of the page's top. Raises `SystemExit` where the browser makes none."""
    with tempfile.TemporaryDirectory() as folder:
        framed = Path(folder) / "frame.html"  # windows have a least width; a frame has none
        size = f"width:{shape.width}px;height:{shape.height}px;border:0;display:block"
        framed.write_text(f'<body style="margin:0"><iframe style="{size}" src="{page.resolve().as_uri()}"></iframe>')
        command = [chromium, "--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", "--allow-file-access-from-files"]
        command += [f"--blink-settings=preferredColorScheme={0 if shape.dark else 1}"]
        command += [f"--window-size={shape.width},{shape.height}", f"--screenshot={target.resolve()}", framed.as_uri()]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if not target.is_file():
        raise SystemExit(f"{chromium} made no picture of {page}: {ran.stderr.strip()[-500:]}")


def trace(folder: Path) -> Path:
    """The query of docs/images/timeline.svg, plain and accelerated, on simulated engines."""
    code = (
        "import asyncio, sys; from pathlib import Path; from benchmarks.timeline_picture import both;"
        "from teola_plugin.observe import html_page;"
        "page = html_page(asyncio.run(both()), 'One question over an upload', labels=('plain', 'accelerated'));"
        "Path(sys.argv[1]).write_text(page, encoding='utf-8')"
    )
    page = folder / "trace.html"
    python("-c", code, str(page))
    return page


def compare(folder: Path) -> Path:
    """`teola compare --plot` of the README's chain."""
    (folder / "readme_app.py").write_text(APP)
    given = folder / "inputs.jsonl"
    given.write_text("".join(f'{{"text": "{one}"}}\n' for one in QUESTIONS))
    page = folder / "compare.html"
    options = ("--inputs", str(given), "--plot", str(page))
    python("-m", "teola_plugin.cli.main", "compare", "readme_app:chain", *options, cwd=folder)
    return page


def queries(folder: Path) -> Path:
    """Recent queries of a server on fake engines."""
    return served(folder, "recent")


def pool(folder: Path) -> Path:
    """The pool of the same."""
    return served(folder, "pool")


def trying(folder: Path) -> Path:
    """The page to try an app, its settings unfolded."""
    page = served(folder, "try", asking="", apps=APPS)
    page.write_text(page.read_text(encoding="utf-8").replace('id="settings"', 'id="settings" open'), encoding="utf-8")
    return page


def waiting(folder: Path) -> Path:
    """A query that waits for somebody."""
    return served(folder, "query", asking=SUBMITTING, apps=APPS)


def served(folder: Path, section: str, *, asking: str = ASKING, apps: str = "") -> Path:
    """A page of `teola serve` as a browser has put it together, in one file. `asking` is run before; what it prints
    says more of the section."""
    (folder / "pool.yaml").write_text(POOL + apps)
    (folder / "farm.py").write_text(FARM)
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[-1]
            more = python("-c", asking, url).strip() if asking else ""
            shown = dumped(folder, f"{url}/#{section}/{more}".rstrip("/"))
            with urlopen(f"{url}/pages/page.css") as answer:
                style = answer.read().decode()
        finally:
            process.terminate()
            process.wait(30)
    page = folder / f"{section}.html"
    shown = re.sub(r"<script.*?</script>", "", shown)
    page.write_text(re.sub(r'<link rel="stylesheet"[^>]*>', f"<style>{style}</style>", shown), encoding="utf-8")
    return page


def dumped(folder: Path, url: str) -> str:
    """The document at an address, once its scripts have run. Raises `SystemExit` where there is no browser."""
    chromium = browser()
    if chromium is None:
        raise SystemExit(MISSING)
    command = [chromium, "--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={folder}/dumping"]
    command += ["--virtual-time-budget=4000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def demo(folder: Path) -> Path:
    """What `teola demo` prints; of an earlier run where `TEOLA_DEMO_PRINTED` names a file with it."""
    earlier = os.environ.get("TEOLA_DEMO_PRINTED")
    run = ("-m", "teola_plugin.cli.main", "demo", "--trace", str(folder / "trace.html"))
    printed = Path(earlier).read_text(encoding="utf-8") if earlier else python(*run)
    return terminal(folder, "$ teola demo\n" + re.sub(r"/\S*/(\S+\.html)", r"\1", printed))


def terminal(folder: Path, printed: str) -> Path:
    """A page that shows it."""
    shown = re.sub(r"(?m)^(  (plain|accelerated) +)(█+)", r'\1<span class="\2">\3</span>', html.escape(printed))
    shown = re.sub(r"(?m)^(\$ .*|  [0-9.]+x (?:faster|slower).*)$", r"<b>\1</b>", shown)
    page = folder / "demo.html"
    page.write_text(TERMINAL.replace("BODY", shown), encoding="utf-8")
    return page


PAGES: dict[str, Callable[[Path], Path]] = {
    "trace": trace,
    "compare": compare,
    "queries": queries,
    "pool": pool,
    "try": trying,
    "waiting": waiting,
    "demo": demo,
}


def python(*arguments: str, cwd: Path = ROOT) -> str:
    """What it prints; it may import this checkout. Raises `SystemExit` where it fails."""
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)
    if ran.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]} failed:\n{ran.stderr.strip()[-2000:]}")
    return ran.stdout


def environment() -> dict[str, str]:
    """In which this checkout may be imported."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "110"}


def pictures(target: Path, names: list[str], chromium: str) -> Iterator[Path]:
    """Writes them, and gives where each lies."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            page = PAGES[name](Path(folder))
            for scheme, shape in SHAPES[name].items():
                picture = target / f"{name}-{scheme}.png"
                shoot(chromium, page, picture, shape)
                yield picture


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("target", type=Path, help="the folder that they are put into")
    parser.add_argument("--only", nargs="+", choices=list(PAGES), default=list(PAGES), help="pages (default: all)")
    options = parser.parse_args()
    chromium = browser()
    if chromium is None:
        print(f"screenshots: {MISSING}", file=sys.stderr)
        return 1
    for picture in pictures(options.target, options.only, chromium):
        print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
