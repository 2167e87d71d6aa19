"""`support.private_names`: what it finds, and what it leaves alone."""

from __future__ import annotations

from support.private_names import Code, Module, touches


def found(source: str, *others: str) -> list[tuple[str, str]]:
    more = [Module(f"other{i}.py", other) for i, other in enumerate(others)]
    return [(touch.kind, touch.name) for touch in Code([Module("a.py", source), *more]).touches("a.py")]


def test_imports_of_private_names_and_modules() -> None:
    assert found("from framework.a import _b") == [("import", "framework.a._b")]
    assert found("from framework._a import b") == [("import", "framework._a.b")]
    assert found("import framework._a.b") == [("import", "framework._a.b")]
    assert found("from framework.a import b\nfrom teola_plugin.a import _b\nfrom _thread import _b") == []


def test_attributes_of_other_objects() -> None:
    assert found("x._llm") == [("attribute", "_llm")]
    assert found("x.y()._llm = 1") == [("attribute", "_llm")]
    assert found("x.__hidden") == [("attribute", "__hidden")]
    assert found("x.llm\nx.__dict__\nx._replace(a=1)") == []


def test_names_of_this_file_are_its_own() -> None:
    assert found("class A:\n    def __init__(self):\n        self._llm = 1\n\ndef of(a):\n    return a._llm") == []
    assert found("class A:\n    __slots__ = ('_llm',)\n\ndef of(a):\n    return a._llm") == []
    assert found("class A:\n    _llm: int\n\ndef of(a):\n    return getattr(a, '_llm')") == []


def test_names_of_classes_that_it_extends_are_its_own() -> None:
    child = "from x import A\nclass B(A[int]):\n    def f(self):\n        return self._llm"
    assert found(child, "class A(Base):\n    pass", "class Base:\n    _llm = 1") == []
    assert found(child, "class A(Elsewhere):\n    pass") == [("inherited", "_llm")]
    assert found(child.replace("self._llm", "super()._llm")) == [("inherited", "_llm")]


def test_names_of_unrelated_classes_of_ours_are_not() -> None:
    assert found("def of(a):\n    return a._llm", "class A:\n    _llm = 1") == [("attribute", "_llm")]


def test_strings() -> None:
    assert found("getattr(x, '_llm', None)") == [("string", "_llm")]
    assert found("NAMES = {'a': 'retriever._llm'}") == [("string", "_llm")]
    assert found("'''_llm'''\ndef f():\n    '_llm'") == []
    assert found("'__teola__', 'a_b', '_', 'the _llm of it'") == []
    assert found("f'{x}_llm', name.endswith('_llm')") == []
    assert found("f'_llm'") == [("string", "_llm")]


def test_the_standard_library_is_nobodys_secret() -> None:
    assert found("import sys\nsys._getframe()") == []
    assert found("import framework\nframework._getframe()") == [("attribute", "_getframe")]


def test_patches() -> None:
    assert found("from framework import A\nA.invoke = None") == [("patch", "invoke")]
    assert found("import framework\nframework.a = None\ndel framework.b") == [("patch", "a"), ("patch", "b")]
    assert found("from teola_plugin.a import A\nA.invoke = None\nx = 1\nx.y = 2") == []


def test_code_objects() -> None:
    assert found("class A:\n    __code__ = f.__code__") == [("code", "__code__")]
    assert found("import types\ntypes.CodeType()") == [("code", "CodeType")]
    assert found("f.__code__.replace(co_flags=1)") == [("code", "co_flags")]
    assert found("f.__code__.co_flags\nisinstance(x, CodeType)") == []


def test_it_reads_each_file_of_the_project_once() -> None:
    paths = Code.read().modules
    assert {"teola_plugin/pool.py", "adapters/calls.py", "tracer/draft.py"} <= paths.keys()
    assert not [path for path in paths if path.startswith("teola_plugin/adapters")]


def test_what_is_allowed_is_left_out() -> None:
    shims = touches(["teola_plugin/shims"], leave_out=())
    for one in shims[:1]:
        assert one not in touches(["teola_plugin/shims"], leave_out=(), allowed={one.path: [one.name]})
