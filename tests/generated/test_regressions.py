"""Programs that random generation found, each shrunk: they answer and store the same as the original."""

from __future__ import annotations

import pytest
from generated.hunting import KINDS
from generated.seeing import Program, Stage, compared
from generated.write_programs import GIVEN

WRITES = KINDS["writes"][0]


CHAINS = KINDS["chains"][0]
ASKED = """given = {
    "question": "who sails a copper boat?",
    "history": ["hello"],
    "messages": [HumanMessage("hello")],
}"""


def same(chain: str, way: str, stage: Stage = WRITES, given: str = GIVEN) -> None:
    found = compared(stage, Program(0, f"chain = passthrough | {chain}\n{given}", way))
    assert not found, "\n".join(f"{aspect}: {text}" for aspect, text in found.items())


ways = pytest.mark.parametrize("way", ["invoke", "ainvoke"])
EARLY = 'assign(k=itemgetter("question") | retriever) | assign(n=ask("Say {question}"))'
"""Something that may begin before its place."""
SLOW = 'assign(a=ask("Say {question}")) | assign(b=ask("Shorten {a}")) | assign(c=ask("Rewrite {b}"))'
"""While it runs, much of what follows can begin."""


@ways
def test_second_text_of_an_id_is_written(way: str) -> None:
    same(f'assign(w1=did(put, "b", "draft")) | assign(w2=did(put, "b", "final")) | {EARLY}', way)


@ways
def test_row_that_was_deleted_is_written_again(way: str) -> None:
    put = 'did(put, "b", "bread")'
    same(f'assign(w1={put}) | assign(w2=did(drop, "b")) | assign(w3={put}) | {EARLY}', way)


@ways
def test_search_finds_each_version_of_a_row_in_turn(way: str) -> None:
    steps = " | ".join(
        f'assign(w{n}=did(put, "b", "bread {n}")) | assign(l{n}=did(look, "k{n}", "bread"))' for n in range(4)
    )
    same(f"{steps} | {EARLY}", way)


@ways
def test_search_finds_rows_written_by_another_connection(way: str) -> None:
    same(f'{SLOW} | assign(w=did(outside_put, "b", "apple oven there")) | {EARLY}', way)


@ways
def test_search_skips_rows_deleted_by_another_connection(way: str) -> None:
    same(f'{SLOW} | assign(w=did(outside_drop, "a")) | {EARLY}', way)


@ways
def test_no_document_is_indexed_after_a_failed_step(way: str) -> None:
    same(f'{SLOW} | assign(j=ask("JSON {{c}}") | JsonOutputParser()) | assign(i=itemgetter("docs") | index)', way)


@ways
def test_search_before_an_index_step_does_not_find_its_rows(way: str) -> None:
    index = 'assign(i=itemgetter("docs") | index)'
    same(f'{SLOW} | assign(k=itemgetter("question") | retriever) | {index}', way)


@ways
def test_deleted_documents_are_indexed_again(way: str) -> None:
    index = 'itemgetter("docs") | index'
    same(f"assign(i={index}) | assign(w=did(clear)) | assign(j={index})", way)


@ways
def test_documents_are_indexed_with_metadata_set_by_a_function(way: str) -> None:
    same(f'{SLOW} | assign(w=did(stamp, 2)) | assign(i=itemgetter("docs") | index)', way)


@ways
def test_repeated_index_step_writes_twice(way: str) -> None:
    same('assign(i=itemgetter("docs") | index) | assign(j=itemgetter("docs") | index)', way)


@ways
def test_search_finds_rows_written_by_an_earlier_function(way: str) -> None:
    again = 'assign(w2=did(put, "c", "boat")) | assign(k2=itemgetter("question") | retriever)'
    same(f'assign(w1=did(put, "c", "apple oven new")) | {EARLY} | {again}', way)


@ways
def test_search_uses_the_question_changed_by_a_function(way: str) -> None:
    same(f'{SLOW} | assign(w=did(change_question, "today")) | {EARLY}', way)


# ------------------------------------------------------------ the user's own models

AGAIN = 'assign(k=ask("Explain {question}", hosted))'


@ways
@pytest.mark.parametrize("before", ["llm", "hosted"])
def test_model_is_not_called_after_a_function_raises(way: str, before: str) -> None:
    refused = 'assign(w=did(allow, "copper"))'
    same(f'assign(a=ask("Say {{question}}", {before})) | {refused} | {AGAIN}', way, CHAINS, ASKED)


@ways
def test_model_is_not_called_after_a_missing_key(way: str) -> None:
    same(f'assign(a=ask("Say {{question}}")) | assign(n=itemgetter("nothing")) | {AGAIN}', way, CHAINS, ASKED)


@ways
def test_model_is_not_called_after_a_prompt_without_its_variable(way: str) -> None:
    same(f'assign(a=ask("Say {{question}}")) | assign(b=ask("Say {{nothing}}")) | {AGAIN}', way, CHAINS, ASKED)


@ways
def test_error_of_a_parser_is_the_originals_though_a_later_call_may_have_been_made(way: str) -> None:
    parsed = 'assign(b=ask("Say {question}", hosted) | JsonOutputParser())'
    chain = f'chain = passthrough | assign(a=ask("Shorten {{question}}")) | {parsed} | {AGAIN}'
    assert compared(CHAINS, Program(0, f"{chain}\n{ASKED}", way)).keys() <= {"side_effects"}


@ways
@pytest.mark.parametrize("model", ["llm", "hosted"])
def test_model_gets_messages_appended_by_a_function(way: str, model: str) -> None:
    changed = 'assign(w=did(remember, "and then?"))'
    step = f'assign(k=get("messages") | {model} | StrOutputParser())'
    same(f'assign(a=ask("Say {{question}}")) | {changed} | {step}', way, CHAINS, ASKED)


@ways
@pytest.mark.parametrize("model", ["llm", "hosted"])
def test_model_gets_the_message_changed_by_a_function(way: str, model: str) -> None:
    changed = 'assign(w=did(correct, "there"))'
    step = f'assign(k=get("messages") | {model} | StrOutputParser())'
    same(f'assign(a=ask("Say {{question}}")) | {changed} | {step}', way, CHAINS, ASKED)


@ways
def test_prompt_has_the_history_appended_by_a_function(way: str) -> None:
    changed = 'assign(w=did(remember, "and then?"))'
    same(f'assign(a=ask("Say {{question}}")) | {changed} | assign(k=ask("{{history}}", hosted))', way, CHAINS, ASKED)


@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_no_row_is_written_after_another_input_of_the_batch_fails(way: str) -> None:
    """LangChain takes a batch step by step, with `max_concurrency`, too: the first step that fails is the last."""
    text = f"""chain = (
        passthrough | assign(a=ask("Say {{question}}")) | assign(b=ask("Shorten {{question}}"))
        | does(allow, "And why") | does(put, "b", "text")
    )
{ASKED}"""
    found = compared(CHAINS, Program(0, text, way, {"max_concurrency": 2}))
    assert not found, found
