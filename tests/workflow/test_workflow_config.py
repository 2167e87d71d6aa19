"""Tests of settings and inputs of a query: checked, frozen, as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.sample_workflows import advanced_rag

from teola_plugin.errors import RegistrationError
from teola_plugin.workflow import (
    Chunking,
    Config,
    Document,
    Function,
    Generation,
    Input,
    Kind,
    Map,
    Prompt,
    Searching,
    Synthesis,
    Workflow,
)

RAG = advanced_rag()


@pytest.mark.parametrize("settings", [{"chunk_size": 64}, {"index.chunk_size": 64}, {"index": {"chunk_size": 64}}])
def test_three_forms_of_a_setting_give_the_same_config(settings: dict[str, Any]) -> None:
    config = RAG.config(settings)
    assert config == Config((("index", (("chunk_size", 64),)),))
    assert config["index"]["chunk_size"] == 64 and hash(config) == hash(RAG.config(chunk_size=64))


def test_settings_equal_to_defaults_are_no_change() -> None:
    assert RAG.config({"index.chunk_size": 20, "best": {"k": 3}}) == Config()


def test_config_survives_a_json_round_trip() -> None:
    prompt = {"text": "{question}: {context}", "system": "Be short."}
    settings = {"found.k": 4, "mode": "tree", "answer": {"prompt": prompt, "stop": ["\n"], "temperature": 1}}
    config = RAG.config(settings)
    assert config["answer"]["prompt"] == Prompt(**prompt)
    assert RAG.config(json.loads(json.dumps(config.to_dict()))) == config
    assert len(config) == 2 and set(config) == {"found", "answer"}


def test_settings_change_the_lowered_graph() -> None:
    lowered = RAG.lower(RAG.config({"found.k": 5, "n": 4, "mode": "tree"}))
    made = {c.name: c for c in lowered.traced.template.components}
    assert "answer.leaves" in made and "answer.refine" not in made
    assert made["queries"].expected == 4


def test_settings_of_bodies_use_component_names() -> None:
    flow = Generation("list", "{x}", items="lines") >> Map("m", over="list", flow=Generation("one", "{item}"))
    workflow = Workflow("w", flow)
    lowered = workflow.lower(workflow.config({"one.prompt": "Again: {item}"}))
    [holder] = [c for c in lowered.traced.template.components if c.name == "m"]
    assert holder.body is not None and holder.body["one"].prompt[0].text == "Again: "


BAD = {
    "found.k": (0, r"found.k is 0; expected a whole number of at least 1. Next: e.g. found.k=8"),
    "best.k": (True, "best.k is True; expected a whole number"),
    "mode": ("fast", "answer.mode is 'fast'; expected one of refine, compact, tree"),
    "answer.temperature": (-1, "expected a number of at least 0"),
    "answer.top_p": (2.0, "expected a number of at least 0 and at most 1"),
    "answer.stop": ("x", "expected a list of texts"),
    "answer.prompt": ("{question", "the prompt '{question' cannot be read"),
    "answer.refine_prompt": ("{question}", "answer.refine_prompt lacks {answer}"),
    "queries.prompt": ("{question} {x}", "queries.prompt has {x}; it has to have {question}, and may have {n}"),
    "chunk_overlap": (20, "index.chunk_overlap is 20; expected less than chunk_size, which is 20"),
    "k": (3, "'k' is a setting of found, best. Next: say which: found.k"),
    "found.q": (3, "unknown setting 'found.q'"),
    "chunksize": (3, "unknown setting 'chunksize'"),
    "lost.k": (3, "unknown setting 'lost.k'"),
}


@pytest.mark.parametrize("key", BAD)
def test_invalid_setting_raises_registration_error(key: str) -> None:
    value, message = BAD[key]
    with pytest.raises(RegistrationError) as error:
        RAG.config({key: value})
    assert message in str(error.value) and error.value.hint


def test_config_that_is_no_mapping_raises() -> None:
    with pytest.raises(RegistrationError, match="configured with"):
        RAG.config([("k", 3)])  # type: ignore[arg-type]


def test_invalid_component_setting_raises_registration_error() -> None:
    with pytest.raises(RegistrationError, match=r"found.k is 'x'; expected a whole number"):
        Searching("found", k="x")  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="chunk_overlap"):
        Chunking("c", chunk_size=10, chunk_overlap=10)
    with pytest.raises(RegistrationError, match=r"a.items is 'xml'; expected one of json"):
        Generation("a", items="xml")
    with pytest.raises(RegistrationError, match=r"a.reads has 'x', which is no variable of the prompt"):
        Generation("a", "{y}", reads={"x": "z"})


@pytest.mark.parametrize("text", ["{a.b}", "{a!r}", "{a:>9}", "{}", "{0}", "}"])
def test_malformed_prompt_raises_error_with_hint(text: str) -> None:
    with pytest.raises(RegistrationError, match="the prompt") as error:
        Prompt(text)
    assert "{{" in error.value.hint


def test_prompt_escapes_braces_and_finds_variables() -> None:
    prompt = Prompt("{{x}} {y} {n}", "{y}").with_(n="{3}")
    assert prompt.variables == ("y",)
    assert prompt.rendered({"y": ["a", "b"]}).messages[1].content == "{x} a\n\nb {3}"


# ------------------------------------------------------------ schemas


def test_config_schema_describes_the_settings() -> None:
    schema = RAG.config_schema()["properties"]
    assert schema["found"]["properties"]["k"] == {
        "type": "integer",
        "minimum": 1,
        "description": "passages for each question",
        "default": 8,
    }
    assert schema["answer"]["properties"]["mode"]["enum"] == ["refine", "compact", "tree"]
    assert "anyOf" in schema["answer"]["properties"]["prompt"]
    assert json.loads(json.dumps(schema)) == schema


def test_input_schema_lists_required_and_default_inputs() -> None:
    schema = RAG.input_schema()
    assert schema["required"] == ["documents", "question"] and schema["title"] == "advanced_rag"
    assert schema["properties"]["question"] == {"type": "string"}
    declared = Workflow(
        "w",
        Function("f", lambda x, y: x, pure=True),
        inputs=[Input("x", Kind.TEXTS, "words"), Input("y", Kind.FLAG, default=False)],
    ).input_schema()
    assert declared["properties"]["x"] == {"type": "array", "items": {"type": "string"}, "description": "words"}
    assert declared["required"] == ["x"] and declared["properties"]["y"]["default"] is False


# ------------------------------------------------------------ inputs


def test_missing_or_unknown_input_raises_registration_error() -> None:
    with pytest.raises(RegistrationError, match="lacks the input 'documents'; its inputs are documents, question"):
        RAG.bind({"question": "?"})
    with pytest.raises(RegistrationError, match="has no input 'text'"):
        RAG.bind({"question": "?", "documents": [], "text": ""})
    with pytest.raises(RegistrationError, match="was given str for its inputs"):
        RAG.bind("?")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [7, [7], {"metadata": {}}, [{"text": 7}], None])
def test_input_that_is_no_document_raises(given: Any) -> None:
    with pytest.raises(RegistrationError, match=r"the input 'documents' is .* which is not a document"):
        RAG.bind({"question": "?", "documents": given})


def test_documents_of_all_forms_are_accepted() -> None:
    class Page:
        page_content, metadata = "of LangChain", {"page": 1}

    given = ["a text", {"text": "of JSON", "metadata": {"a": 1}}, Page(), Document("ours")]
    found = RAG.bind({"question": "?", "documents": given})["documents"]
    assert [one.text for one in found] == ["a text", "of JSON", "of LangChain", "ours"]
    assert [dict(one.metadata) for one in found] == [{}, {"a": 1}, {"page": 1}, {}]


def test_default_of_an_input_is_bound() -> None:
    workflow = Workflow("w", Synthesis("answer", context="context"), inputs=[Input("context", default="nothing")])
    assert workflow.bind({"question": "?"}) == {"context": "nothing", "question": "?"}
