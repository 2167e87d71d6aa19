"""What `benchmarks.drafts` asks: thirty questions over Python's reference text, sixteen held out over what modules of
its library say of themselves, and prompts with nothing to copy from.

Written by hand, before anything was tuned with them; nothing is tuned with those held out.
"""

from __future__ import annotations

import re
from importlib import import_module

QUESTIONS = (
    ("try", "What does an expression-less except clause match?"),
    ("try", "When is the finally clause executed?"),
    ("raise", "What happens if raise is written without an expression?"),
    ("raise", "What does the from clause of a raise statement do?"),
    ("with", "In which order does a with statement call the methods of a context manager?"),
    ("class", "What can the inheritance list of a class definition hold?"),
    ("comparisons", "How are comparisons chained?"),
    ("comparisons", "How are sequences compared?"),
    ("calls", "When are the arguments of a call evaluated?"),
    ("calls", "What does the syntax *expression in a call mean?"),
    ("function", "When are default parameter values evaluated?"),
    ("function", "What is a decorator expression?"),
    ("import", "What does an import statement without a from clause do?"),
    ("import", "Which names does a wildcard import bind?"),
    ("identifiers", "Which characters are valid in an identifier?"),
    ("execmodel", "What is a code block?"),
    ("execmodel", "What is the scope of a name defined in a class block?"),
    ("naming", "What binds a name?"),
    ("assignment", "What happens when a list of targets is assigned?"),
    ("assignment", "What is an annotated assignment?"),
    ("async", "Where may an await expression be used?"),
    ("strings", "What does the prefix of a string literal mean?"),
    ("strings", "How is a backslash escaped in a string literal?"),
    ("formatstrings", "What does the conversion field of a replacement field do?"),
    ("formatstrings", "What does the precision of a format specification say?"),
    ("objects", "What is the identity of an object?"),
    ("objects", "When are objects destroyed?"),
    ("subscriptions", "What happens when a sequence is subscripted with a negative index?"),
    ("dict", "What does a dictionary display yield?"),
    ("binary", "What does the multiplication operator yield for sequences?"),
)
"""(topic of `pydoc_data`, question)"""

HELD_OUT = (
    ("heapq", "What is always the smallest element of a heap?"),
    ("heapq", "What are heaps useful for in big disk sorts?"),
    ("copy", "What does a shallow copy construct?"),
    ("copy", "Which two problems exist with deep copy operations?"),
    ("shelve", "What can the values in a shelf be?"),
    ("shelve", "What does the keyword argument writeback consume?"),
    ("socketserver", "When does it make no sense to use a forking server?"),
    ("socketserver", "From which class must a service be derived?"),
    ("configparser", "Of what does a configuration file consist?"),
    ("configparser", "When are options without values accepted?"),
    ("difflib.SequenceMatcher", "What is the idea of the basic algorithm?"),
    ("difflib.SequenceMatcher", "What does the ratio method return?"),
    ("textwrap.TextWrapper", "What happens to words that are longer than the width?"),
    ("unittest.case.TestCase", "In which method should the test code be placed by default?"),
    ("asyncio.gather", "What happens to the children if the outer future is cancelled?"),
    ("logging.Logger", "What does an instance of the class represent?"),
)
"""(module, or class or function in it, question)"""

NOTHING_TO_COPY = (
    "Hello.",
    "Name a river.",
    "Say something about the sea.",
    "How old is the moon?",
    "Tell me a story about a fox.",
    "What is your name?",
    "Count to ten.",
    "Why is grass green?",
    "Describe a winter morning.",
    "Which bread is best?",
)
"""Without a passage: whatever is answered stands nowhere before."""

CHUNK = 1024
"""Characters of a passage, as in the demo."""


def passages(topic: str, question: str) -> tuple[str, str]:
    """The two passages of the topic that share most words with the question, the likelier one first."""
    text = re.sub(r"\s+", " ", _text(topic)).strip()
    chunks = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]
    asked = _words(question)
    chunks.sort(key=lambda chunk: -len(asked & _words(chunk)))
    first, second = (chunks * 2)[:2]
    return first, second


def _text(topic: str) -> str:
    """A topic of `pydoc_data`, or what a module of the library, or something in it, says of itself."""
    from pydoc_data.topics import topics

    if topic in topics:
        return str(topics[topic])
    if topic == "heapq":
        return str(import_module(topic).__about__)
    module, _, name = topic.rpartition(".")
    return str((getattr(import_module(module), name) if module else import_module(topic)).__doc__)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{3,}", text.lower()))
