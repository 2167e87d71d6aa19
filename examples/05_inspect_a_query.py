"""Where the time of one query went: figures, critical path, a page for the browser, a file for Perfetto.

    python examples/05_inspect_a_query.py [FOLDER]

prints::

    default q1: closed in 744 ms
      primitives  13 (6 on the critical path)
      critical    738 ms running, 3.93 ms waiting, 2.19 ms your code
      ...
      passes      prune-dependencies, prefilling-split
    the answer waited for:
      summary.model.prefilling       after 3.22 ms  42.9 ms
      ...
      model.decoding                 after 24 µs    313 ms
    wrote trace.html and trace.json (open it at https://ui.perfetto.dev)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.observe import format_summary, html_page, write_chrome_trace
from teola_plugin.observe.text import duration

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="teola-"))

with EnginePool.local(fake_engines(rtx3090())) as pool:
    llm = ChatTeola(pool=pool, max_tokens=12)
    translate = ChatPromptTemplate.from_template("Translate to English: {text}") | llm | StrOutputParser()
    summarise = ChatPromptTemplate.from_template("Summarise: {text}") | llm | StrOutputParser()
    report = ChatPromptTemplate.from_template("You write reports. " * 25 + "{translated}\n{summary}")
    fast = accelerate(
        RunnablePassthrough.assign(translated=translate)
        | RunnablePassthrough.assign(summary=summarise)
        | report
        | llm
        | StrOutputParser()
    )
    fast.invoke({"text": "Die Lämmer fressen Hafer."})
    trace = fast.last_trace()

assert trace is not None
print(format_summary(trace))
print("the answer waited for:")
for step in trace.critical_path():  # without a gap: with your own code, the seconds add up to those of the query
    if step.span.engine:
        print(f"  {step.span.primitive:30} after {duration(step.idle + step.waited):8} {duration(step.seconds)}")
(folder / "trace.html").write_text(html_page([trace], "One query"), encoding="utf-8")
write_chrome_trace(folder / "trace.json", [trace])
print("wrote trace.html and trace.json (open it at https://ui.perfetto.dev)")
