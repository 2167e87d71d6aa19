"""Tests of names of devices: `cuda` and `cuda:0` are the same, and two GPUs are different."""

from __future__ import annotations

import pytest

from teola_plugin.graph import EngineProfile
from teola_plugin.graph.device import normalize, on_host, share_hardware
from teola_plugin.passes import PassContext


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("", ""),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cuda:10,2", "cuda:2,10"),
        ("mps", "mps:0"),
        ("cpu", "cpu"),
        ("cpu:0-2,5", "cpu:0,1,2,5"),
        ("cpu:0-1|2-3", "cpu:0,1,2,3"),
        ("cuda:GPU-5ebe9f43-1c", "cuda:GPU-5ebe9f43-1c"),
        ("cuda@node-1", "cuda:0@node-1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://user@host/v1", "http://user@host/v1"),
        ("gpu0", "gpu0"),
        ("database", "database"),
    ],
)
def test_device_spellings_normalize_to_one_name(spelling: str, name: str) -> None:
    assert normalize(spelling) == name == normalize(name)
    assert EngineProfile(device=spelling).device == name


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("cuda", "cuda:0", True),
        ("cuda:0", "cuda:1", False),
        ("cuda:0,1", "cuda:1", True),
        ("cuda:0,1", "cuda:2", False),
        ("cuda:0@a", "cuda:0@b", False),
        ("cuda:0@a", "cuda:0,3@a", True),
        ("cpu:0-3", "cpu:2", True),
        ("cpu:0", "cpu:1", False),
        ("cpu", "cpu", True),
        ("cpu", "cpu:1", False),
        ("cpu:0", "cuda:0", False),
        ("http://a/v1", "http://a/v1", True),
        ("http://a/v1", "http://b/v1", False),
        ("", "", False),
        ("", "cuda:0", False),
    ],
)
def test_engines_on_shared_hardware_do_not_overlap(one: str, other: str, shared: bool) -> None:
    assert share_hardware(one, other) is share_hardware(other, one) is shared
    context = PassContext({"a": EngineProfile(device=one), "b": EngineProfile(device=other)})
    assert context.overlap("a", "b") is not shared


def test_on_host_adds_the_node_to_hardware_not_to_servers() -> None:
    assert on_host("cuda", "n1") == "cuda:0@n1" and on_host("cpu:0-1", "n1") == "cpu:0,1@n1"
    assert on_host("", "n1") == "" and on_host("http://a/v1", "n1") == "http://a/v1"
    assert on_host("cuda:0@n0", "n1") == "cuda:0@n0"
