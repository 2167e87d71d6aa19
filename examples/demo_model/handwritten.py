"""Forty questions that a person would ask of Python's reference, with words that a right answer must contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    topic: str
    question: str
    expected: str
    """Stands in the topic's text, and must stand in the answer."""


ASKED = tuple(
    Asked(*row)
    for row in (
        ("try", "When is the else clause of a try statement executed?", "control flow leaves the"),
        ("try", "What happens when no exception occurs in the try clause?", "no exception handler is executed"),
        ("try", "Where must an except clause without an expression stand?", "must be last"),
        ("try", "What does an expression-less except clause match?", "matches any exception"),
        ("exceptions", "What are exceptions?", "breaking out of the normal flow of control"),
        ("exceptions", "What does the interpreter do when an exception is not handled at all?", "terminates execution"),
        ("exceptions", "How are exceptions identified?", "class instances"),
        ("exceptions", "When does the Python interpreter raise an exception?", "run-time error"),
        ("with", "What is the with statement used for?", "wrap the execution of a block"),
        (
            "with",
            "How do I get a context manager from the context expression?",
            "is evaluated to obtain a context manager",
        ),
        ("raise", "What does raise do if no expressions are present?", "re-raises the exception"),
        ("raise", "What happens if there is no active exception?", "RuntimeError"),
        ("assert", "When is the value of the built-in variable __debug__ determined?", "when the interpreter starts"),
        ("assert", "What is emitted for an assert statement when optimization is requested?", "emits no code"),
        ("del", "In which order are the targets of a list deleted?", "from left to right"),
        ("del", "What is raised if the name is unbound?", "NameError"),
        ("return", "What does the return statement mean in a generator function?", "the generator is done"),
        ("return", "Is a return with a value allowed in an asynchronous generator?", "syntax error"),
        ("continue", "Which cycle does continue go on with?", "next cycle of the nearest enclosing loop"),
        ("break", "What does the loop variable hold if a for loop is ended by break?", "keeps its current value"),
        ("break", "Which loop does break terminate?", "nearest enclosing loop"),
        ("global", "For what does the global declaration hold?", "entire current code block"),
        ("nonlocal", "Which variables does the nonlocal statement refer to?", "nearest enclosing scope"),
        ("if", "When is the suite of the else clause executed?", "all expressions are false"),
        ("while", "What does a continue statement in the first suite do?", "goes back to testing the expression"),
        ("for", "How often is the starred_list expression evaluated?", "evaluated once"),
        ("for", "What happens when the iterator is exhausted?", "the loop terminates"),
        ("lambda", "What can functions created with lambda expressions not contain?", "statements or annotations"),
        ("lambda", "What are lambda expressions used for?", "create anonymous functions"),
        ("yield", "What turns a function into a generator function?", "sufficient to cause"),
        ("async", "At which points can coroutines be suspended?", "many points"),
        ("async", "What does the async for statement allow?", "iteration over asynchronous iterables"),
        ("function", "When are decorator expressions evaluated?", "when the function is defined"),
        ("class", "What is a class definition?", "executable statement"),
        ("class", "Where is the order of attributes in the class body preserved?", "__dict__"),
        ("import", "What happens if the list of identifiers is replaced by a star?", "all public names"),
        ("booleans", "What does the operator not yield?", "if its argument is false"),
        ("comparisons", "Which priority do comparison operations have?", "same priority"),
        ("dict", "What does a double asterisk denote?", "dictionary unpacking"),
        ("integers", "Is there a limit for the length of integer literals?", "available memory"),
    )
)
HELD_OUT = frozenset(asked.question for asked in ASKED)
"""Questions that may not be trained on."""
