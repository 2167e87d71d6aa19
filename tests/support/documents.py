"""The documents of the project, and the code blocks in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MADE = re.compile(r"(<!-- generated: ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

POOL = """
from teola_plugin import EnginePool
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090

pool = EnginePool.local(fake_engines(rtx3090()))
"""
CHAINS = """
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from teola_plugin.langchain import ChatTeola

prompt = ChatPromptTemplate.from_template("{question}")
chain = prompt | ChatTeola(pool=pool, max_tokens=8) | StrOutputParser()
my_model, my_other_model = FakeListChatModel(responses=["oats"]), FakeListChatModel(responses=["hay"])
my_chain = prompt | my_model | StrOutputParser()
"""
GIVEN = POOL + CHAINS
"""A program that makes what code blocks take for granted."""
FAKE_ENGINES = """
from teola_plugin import pool as pools
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090


def fake_engine(name, given, drafts=None):
    return next(engine for engine in fake_engines(rtx3090()) if engine.name == name)


pools.default_engine = fake_engine
"""
"""Puts fake engines in the place of the models that documents name."""
TAKEN = ("pool", "prompt", "StrOutputParser", "chain", "my_model", "my_other_model", "my_chain")


def code(document: Path) -> list[str]:
    """The Python blocks of a document, except those taken from the examples, which are run there."""
    return PYTHON.findall(MADE.sub("", document.read_text()))


_SAVED = re.compile(r"Save (?:it|this) as (\w+\.py):$|^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def saved_files(document: Path) -> dict[str, str]:
    """Return the files that a tutorial lets its reader write, by name.

    A code block belongs to the file that was named last.
    """
    files: dict[str, str] = {}
    name = ""
    for found in _SAVED.finditer(document.read_text()):
        name = found[1] or name
        if name:
            files[name] = "\n".join(filter(None, (files.get(name), found[2])))
    return files


TUTORIALS = [path for path in DOCUMENTS if saved_files(path)]
"""Documents whose code blocks are files that a reader saves. The last file is the one to run."""
WITH_CODE = [path for path in DOCUMENTS if code(path) and path not in TUTORIALS]

HOW_TO = [path for path in WITH_CODE if path.parent.name == "docs"]
"""Pages whose code blocks are parts of a program, to be read in order."""


def page_program(document: Path) -> str:
    """Return a program that runs the code blocks of a page on fake engines, and imports no package without need."""
    blocks = code(document)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - parameters
    given = GIVEN if used & {*TAKEN} - {"pool"} else POOL
    started = "import atexit\n\natexit.register(pool.close)\npool.start()"
    return "\n\n".join([FAKE_ENGINES, given, started, *blocks])
