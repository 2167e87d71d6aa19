"""The engines of the five applications, to be simulated: two replicas of each LLM, one of everything else."""

from __future__ import annotations

from dataclasses import replace

from examples.apps import agent
from examples.apps.engines import PAGES, answer, functions_of
from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import FakeLLM, FakeTools, FakeWebSearch
from teola_plugin.engines.profiles import rtx3090, tools, web_search
from teola_plugin.graph import EngineProfile
from teola_plugin.simulation import Cluster, SimulatedEngine

LLMS = 2
WAIT = 0.5
"""Seconds of a web search and of a tool. A guess."""


def cluster(policy: str, *, caching: bool) -> Cluster:
    """RTX 3090s, as in `examples.apps.engines.fake_pool`."""
    machine = rtx3090()
    model = replace(machine["llm"], prefix_caching=caching)
    engines = {name: SimulatedEngine("llm", model, LLMS, policy, make=_llm) for name in ("llm", "proxy")}
    engines |= {name: SimulatedEngine(name, machine[name], policy=policy) for name in ("embedder", "reranker", "store")}
    engines["web"] = SimulatedEngine("web", web_search(WAIT), policy=policy, make=_web)
    engines["tools"] = SimulatedEngine("tools", tools(WAIT), policy=policy, make=_tools)
    return Cluster(engines)


def _llm(name: str, profile: EngineProfile, number: int) -> Engine:
    return FakeLLM(name, replace(profile, device=f"{name}{number}"), answer)


def _web(name: str, profile: EngineProfile, number: int) -> Engine:
    return FakeWebSearch(name, profile, [page["text"] for page in PAGES])


def _tools(name: str, profile: EngineProfile, number: int) -> Engine:
    return FakeTools(name, functions_of(agent.TOOLS), profile)
