"""What random programs found, each made small: plain and accelerated, they answer and store the same."""

from __future__ import annotations

import pytest
from generated.hunting import KINDS
from generated.seeing import Program, compared
from generated.write_programs import GIVEN

WRITES = KINDS["writes"][0]


def same(chain: str, way: str, **options: str) -> None:
    program = Program(0, f"chain = passthrough | {chain}\n{GIVEN}", way, {}, options)
    found = compared(WRITES, program)
    assert not found, "\n".join(f"{aspect}: {text}" for aspect, text in found.items())


ways = pytest.mark.parametrize("way", ["invoke", "ainvoke"])
EARLY = 'assign(k=itemgetter("question") | retriever) | assign(n=ask("Say {question}"))'
"""Something that may begin before its place."""
SLOW = 'assign(a=ask("Say {question}")) | assign(b=ask("Shorten {a}")) | assign(c=ask("Rewrite {b}"))'
"""While it runs, much of what follows can begin."""


@ways
def test_a_second_text_for_an_id_is_written(way: str) -> None:
    same(f'assign(w1=did(put, "b", "draft")) | assign(w2=did(put, "b", "final")) | {EARLY}', way)


@ways
def test_a_row_that_was_deleted_is_written_again(way: str) -> None:
    put = 'did(put, "b", "bread")'
    same(f'assign(w1={put}) | assign(w2=did(drop, "b")) | assign(w3={put}) | {EARLY}', way)


@ways
def test_every_version_of_a_row_is_found_in_turn(way: str) -> None:
    steps = " | ".join(
        f'assign(w{n}=did(put, "b", "bread {n}")) | assign(l{n}=did(look, "k{n}", "bread"))' for n in range(4)
    )
    same(f"{steps} | {EARLY}", way)


@ways
def test_a_search_finds_what_another_connection_wrote(way: str) -> None:
    same(f'{SLOW} | assign(w=did(outside_put, "b", "apple oven there")) | {EARLY}', way)


@ways
def test_a_search_does_not_find_what_another_connection_deleted(way: str) -> None:
    same(f'{SLOW} | assign(w=did(outside_drop, "a")) | {EARLY}', way)


@ways
def test_nothing_is_indexed_behind_a_step_that_fails(way: str) -> None:
    same(f'{SLOW} | assign(j=ask("JSON {{c}}") | JsonOutputParser()) | assign(i=itemgetter("docs") | index)', way)


@ways
def test_a_search_in_front_of_an_index_step_does_not_find_its_rows(way: str) -> None:
    index = 'assign(i=itemgetter("docs") | index)'
    same(f'{SLOW} | assign(k=itemgetter("question") | retriever) | {index}', way)


@ways
def test_documents_are_indexed_again_after_they_were_deleted(way: str) -> None:
    index = 'itemgetter("docs") | index'
    same(f"assign(i={index}) | assign(w=did(clear)) | assign(j={index})", way)


@ways
def test_documents_are_indexed_with_the_metadata_that_a_function_set(way: str) -> None:
    same(f'{SLOW} | assign(w=did(stamp, 2)) | assign(i=itemgetter("docs") | index)', way)


@ways
def test_an_index_step_that_comes_twice_writes_twice(way: str) -> None:
    same('assign(i=itemgetter("docs") | index) | assign(j=itemgetter("docs") | index)', way)


@ways
def test_a_search_finds_what_a_function_wrote_in_front_of_it(way: str) -> None:
    again = 'assign(w2=did(put, "c", "boat")) | assign(k2=itemgetter("question") | retriever)'
    same(f'assign(w1=did(put, "c", "apple oven new")) | {EARLY} | {again}', way)


@ways
def test_a_question_that_a_function_changes_is_searched_for_as_changed(way: str) -> None:
    same(f'{SLOW} | assign(w=did(change_question, "today")) | {EARLY}', way)
