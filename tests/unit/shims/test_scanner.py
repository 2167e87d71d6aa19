"""Tests of `support.private_names`: what it finds, and what it leaves out."""

from __future__ import annotations

from support.private_names import Code, Module, touches


def touches_in(source: str, *others: str) -> list[tuple[str, str]]:
    more = [Module(f"other{i}.py", other) for i, other in enumerate(others)]
    return [(touch.kind, touch.name) for touch in Code([Module("a.py", source), *more]).touches("a.py")]


def test_imports_of_private_names_are_found() -> None:
    assert touches_in("from framework.a import _b") == [("import", "framework.a._b")]
    assert touches_in("from framework._a import b") == [("import", "framework._a.b")]
    assert touches_in("import framework._a.b") == [("import", "framework._a.b")]
    assert touches_in("from framework.a import b\nfrom teola_plugin.a import _b\nfrom _thread import _b") == []


def test_private_attributes_of_other_objects_are_found() -> None:
    assert touches_in("x._llm") == [("attribute", "_llm")]
    assert touches_in("x.y()._llm = 1") == [("attribute", "_llm")]
    assert touches_in("x.__hidden") == [("attribute", "__hidden")]
    assert touches_in("x.llm\nx.__dict__\nx._replace(a=1)") == []


def test_private_names_defined_in_the_file_are_allowed() -> None:
    assert touches_in("class A:\n    def __init__(self):\n        self._llm = 1\n\ndef of(a):\n    return a._llm") == []
    assert touches_in("class A:\n    __slots__ = ('_llm',)\n\ndef of(a):\n    return a._llm") == []
    assert touches_in("class A:\n    _llm: int\n\ndef of(a):\n    return getattr(a, '_llm')") == []


def test_private_names_of_own_base_classes_are_allowed() -> None:
    child = "from x import A\nclass B(A[int]):\n    def f(self):\n        return self._llm"
    assert touches_in(child, "class A(Base):\n    pass", "class Base:\n    _llm = 1") == []
    assert touches_in(child, "class A(Elsewhere):\n    pass") == [("inherited", "_llm")]
    assert touches_in(child.replace("self._llm", "super()._llm")) == [("inherited", "_llm")]


def test_private_names_of_unrelated_own_classes_are_found() -> None:
    assert touches_in("def of(a):\n    return a._llm", "class A:\n    _llm = 1") == [("attribute", "_llm")]


def test_private_names_in_strings_are_found() -> None:
    assert touches_in("getattr(x, '_llm', None)") == [("string", "_llm")]
    assert touches_in("NAMES = {'a': 'retriever._llm'}") == [("string", "_llm")]
    assert touches_in("'''_llm'''\ndef f():\n    '_llm'") == []
    assert touches_in("'__teola__', 'a_b', '_', 'the _llm of it'") == []
    assert touches_in("f'{x}_llm', name.endswith('_llm')") == []
    assert touches_in("f'_llm'") == [("string", "_llm")]


def test_private_names_of_the_standard_library_are_allowed() -> None:
    assert touches_in("import sys\nsys._getframe()") == []
    assert touches_in("import framework\nframework._getframe()") == [("attribute", "_getframe")]


def test_patches_of_framework_attributes_are_found() -> None:
    assert touches_in("from framework import A\nA.invoke = None") == [("patch", "invoke")]
    assert touches_in("import framework\nframework.a = None\ndel framework.b") == [("patch", "a"), ("patch", "b")]
    assert touches_in("from teola_plugin.a import A\nA.invoke = None\nx = 1\nx.y = 2") == []


def test_changes_of_code_objects_are_found() -> None:
    assert touches_in("class A:\n    __code__ = f.__code__") == [("code", "__code__")]
    assert touches_in("import types\ntypes.CodeType()") == [("code", "CodeType")]
    assert touches_in("f.__code__.replace(co_flags=1)") == [("code", "co_flags")]
    assert touches_in("f.__code__.co_flags\nisinstance(x, CodeType)") == []


def test_scanner_reads_each_project_file_once() -> None:
    paths = Code.read().modules
    assert {"teola_plugin/pool.py", "adapters/calls.py", "tracer/draft.py"} <= paths.keys()
    assert not [path for path in paths if path.startswith("teola_plugin/adapters")]


def test_allowed_names_are_left_out() -> None:
    shims = touches(["teola_plugin/shims"], leave_out=())
    for one in shims[:1]:
        assert one not in touches(["teola_plugin/shims"], leave_out=(), allowed={one.path: [one.name]})
