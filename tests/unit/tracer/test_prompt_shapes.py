"""Tests of prompt templates: their parts, early rendering with unknown variables, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)

from teola_plugin.graph import INPUT, Ref
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.tracer.langchain.prompts import bind_prompt, prompt_shape
from teola_plugin.tracer.symbols import BASE, NotUnderstood, Prompted, Record

CHAT = ChatPromptTemplate.from_messages(
    [
        SystemMessage("Be brief. {literal}"),
        ("system", "Context: {context}, {{braces}} in {style}"),
        MessagesPlaceholder("history", optional=True, n_messages=2),
        ("human", "{question}"),
    ]
).partial(style="prose")
RECORD = Record({"context": Ref("found"), "question": Ref(INPUT, ("question",))})


def part_texts(prompted: Prompted) -> list[str]:
    return [(part.variable and f"<{part.variable}>") or part.text for part in prompted.parts]


def messages_of(prompt: Any) -> list[tuple[str, str]]:
    return [(m.type, m.content) for m in prompt.to_messages()]


def test_prompt_parts_are_in_rendered_order_with_merged_literals() -> None:
    prompted = bind_prompt(prompt_shape(CHAT), RECORD)
    assert part_texts(prompted) == [
        "\nsystem: Be brief. {literal}\nsystem: Context: ",
        "<context>",
        ", {braces} in prose\nuser: ",
        "<question>",
        "\nassistant: ",
    ]
    assert [name for name, _ in prompted.inputs] == ["context", "question"]
    assert prompted.parts[0].tokens == len(prompted.parts[0].text) // 4


def test_prompt_with_all_values_renders_as_the_template() -> None:
    given = {"context": "c", "question": 3}
    assert bind_prompt(prompt_shape(CHAT), RECORD).render(given) == CHAT.invoke(given)


def test_prompt_is_cut_off_after_the_first_unknown() -> None:
    prompted = bind_prompt(prompt_shape(CHAT), RECORD)
    start = ("system", "Be brief. {literal}")
    assert messages_of(prompted.render({})) == [start, ("system", f"Context: {UNKNOWN}, {{braces}} in prose")]
    known = ("system", "Context: c, {braces} in prose")
    assert messages_of(prompted.render({"context": "c"})) == [start, known, ("human", UNKNOWN)]


def test_base_record_supplies_optional_variables() -> None:
    prompted = bind_prompt(prompt_shape(CHAT), Record(RECORD.items, Ref(INPUT)))
    assert [name for name, _ in prompted.inputs] == ["context", "question", BASE]
    assert part_texts(prompted)[2:7] == [", {braces} in ", f"<{BASE}>", f"<{BASE}>", "\nuser: ", "<question>"]
    base = {"history": [HumanMessage("0"), AIMessage("1"), ("human", "2")], "style": "verse", "unused": 1}
    given = {"context": "c", "question": "q"}
    assert prompted.render({**given, BASE: base}) == CHAT.invoke({**base, **given})
    assert prompted.render({**given, BASE: {}}) == CHAT.invoke(given)
    assert messages_of(prompted.render(given))[-1] == ("system", f"Context: c, {{braces}} in {UNKNOWN}")


def test_unknown_messages_end_the_prompt() -> None:
    template = ChatPromptTemplate.from_messages([("system", "s"), MessagesPlaceholder("history"), ("human", "{q}")])
    prompted = bind_prompt(prompt_shape(template), Ref("x"))
    assert [(name, str(ref)) for name, ref in prompted.inputs] == [("history", "x.history"), ("q", "x.q")]
    assert messages_of(prompted.render({"q": "known"})) == [("system", "s"), ("human", UNKNOWN)]
    assert messages_of(prompted.render({"q": "k", "history": []})) == [("system", "s"), ("human", "k")]


def test_one_variable_takes_its_value_bare_or_in_a_dictionary() -> None:
    template = ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{q}")])
    prompted = bind_prompt(prompt_shape(template), Ref("x"))
    assert prompted.inputs == (("q", Ref("x")),)
    assert prompted.render({"q": "hi"}) == template.invoke("hi")
    assert prompted.render({"q": {"q": "hi", "history": [("ai", "a")]}}) == template.invoke(
        {"q": "hi", "history": [("ai", "a")]}
    )
    assert messages_of(prompted.render({})) == [("human", UNKNOWN)]


def test_plain_prompts_have_no_role_markers() -> None:
    template = PromptTemplate.from_template("Say {a} to {b}, {a}")
    prompted = bind_prompt(prompt_shape(template), Ref("x"))
    assert part_texts(prompted) == ["Say ", "<a>", " to ", "<b>", ", ", "<a>"]
    assert prompted.render({"a": 1}).to_string() == f"Say 1 to {UNKNOWN}, 1"
    assert prompted.render({"a": 1, "b": [2]}) == template.invoke({"a": 1, "b": [2]})


def test_nested_and_constant_templates_are_understood() -> None:
    template = ChatPromptTemplate.from_messages([CHAT, ("ai", "ok")])
    assert "<context>" in part_texts(bind_prompt(prompt_shape(template), Ref("x")))
    fixed = ChatPromptTemplate.from_messages([("human", "hi")])
    prompted = bind_prompt(prompt_shape(fixed), Ref("x"))
    assert prompted.inputs == () and prompted.render({}) == fixed.invoke({})


def test_a_failing_render_raises_what_the_template_raises() -> None:
    prompted = bind_prompt(prompt_shape(ChatPromptTemplate.from_template("{n:.2f} {m}")), Ref("x"))
    with pytest.raises(ValueError, match="format code"):
        prompted.render({"m": "m"})


class Shouting(PromptTemplate):
    def format(self, **kwargs: Any) -> str:
        return super().format(**kwargs).upper()


class Polite(HumanMessagePromptTemplate):
    pass


class Newest(BaseExampleSelector):
    """Chooses the examples."""

    def add_example(self, example: Any) -> None: ...

    def select_examples(self, input_variables: Any) -> list[dict[str, str]]:
        return [{"a": "now"}]


class OwnExamples(FewShotPromptTemplate):
    def format(self, **kwargs: Any) -> str:
        return super().format(**kwargs).upper()


def few_shot(**given: Any) -> FewShotPromptTemplate:
    options = {
        "examples": [{"a": "1"}, {"a": "{x} too", "unused": print}],
        "example_prompt": PromptTemplate.from_template("For {a}."),
        "prefix": "Examples of {style}:",
        "suffix": "Now {x}, {{literally}}",
        "input_variables": ["x"],
        "partial_variables": {"style": "prose"},
    }
    return FewShotPromptTemplate(**(options | given))


def chat_few_shot(**given: Any) -> FewShotChatMessagePromptTemplate:
    example = ChatPromptTemplate.from_messages([("human", "What of {a}?"), ("ai", "{a} is {{fine}}.")])
    options = {"examples": [{"a": "one"}, {"a": 2}], "example_prompt": example}
    return FewShotChatMessagePromptTemplate(**(options | given))


def test_few_shot_examples_are_part_of_the_text() -> None:
    template = few_shot()
    prompted = bind_prompt(prompt_shape(template), Record({"x": Ref("x")}))
    assert part_texts(prompted)[:3] == ["Examples of prose:\n\nFor 1.\n\nFor ", "<x>", " too.\n\nNow "]
    assert prompted.render({"x": "this"}) == template.invoke({"x": "this"})
    inside = ChatPromptTemplate.from_messages([HumanMessagePromptTemplate(prompt=template)])
    assert bind_prompt(prompt_shape(inside), Ref("x")).render({"x": "this"}) == inside.invoke("this")


def test_chat_few_shot_examples_become_messages() -> None:
    template = ChatPromptTemplate.from_messages([("system", "Be brief."), chat_few_shot(), ("human", "{q}")])
    prompted = bind_prompt(prompt_shape(template), Ref("x"))
    start = "\nsystem: Be brief.\nhuman: What of one?\nai: one is {fine}.\nhuman: What of 2?\nai: 2 is {fine}.\nuser: "
    assert part_texts(prompted) == [start, "<q>", "\nassistant: "]
    assert prompted.render({"q": "this"}) == template.invoke("this")
    assert len(prompted.render({}).to_messages()) == 6
    alone = bind_prompt(prompt_shape(chat_few_shot()), Ref("x"))
    assert alone.inputs == () and alone.render({}) == chat_few_shot().invoke({})
    one = chat_few_shot(example_prompt=HumanMessagePromptTemplate.from_template("Of {a}."))
    assert bind_prompt(prompt_shape(one), Ref("x")).render({}) == one.invoke({})


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (PromptTemplate.from_template("{{x}}", template_format="mustache"), "mustache"),
        (ChatPromptTemplate.from_messages([("human", "{{x}}")], template_format="mustache"), "mustache"),
        (PromptTemplate.from_template("{x}{t}").partial(t=lambda: "now"), "function"),
        (ChatPromptTemplate.from_template("{x}{t}").partial(t=lambda: "now"), "function"),
        (Shouting.from_template("{x}"), "Shouting.format"),
        (
            ChatPromptTemplate.from_messages([HumanMessagePromptTemplate(prompt=Shouting.from_template("{x}"))]),
            "Shouting",
        ),
        (ChatPromptTemplate.from_messages([Polite.from_template("{x}")]), "Polite"),
        (few_shot(examples=None, example_selector=Newest()), "selector"),
        (few_shot(examples=[{"a": Newest()}]), "other than texts"),
        (few_shot(examples=[{"b": 1}]), "lacks 'a'"),
        (few_shot(examples=[{"a": "a lone {"}]), "no template"),
        (few_shot(example_prompt=Shouting.from_template("{a}")), "Shouting"),
        (few_shot(template_format="jinja2"), "jinja2"),
        (OwnExamples(**vars(few_shot())), "OwnExamples"),
        (chat_few_shot(examples=None, example_selector=Newest()), "selector"),
        (chat_few_shot(example_prompt=Polite.from_template("{a}")), "Polite"),
        (ChatPromptTemplate.from_messages([chat_few_shot(examples=[{"a": print}])]), "other than texts"),
    ],
)
def test_template_that_may_run_code_is_not_understood(template: Any, why: str) -> None:
    with pytest.raises(NotUnderstood, match=why):
        prompt_shape(template)
