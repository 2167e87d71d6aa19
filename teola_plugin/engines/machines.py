"""Machines by name, for fakes and the simulator: measured where there are logs, by formula elsewhere.

`rtx3090` is fitted to published logs (see `profiles.rtx3090`). For other cards and models the LLM is worked out from
data sheets: a decoded token reads all weights once, a prefilled token takes two operations a weight,

    decoding    = 2 bytes x parameters / (memory bandwidth x cards x share)
    prefilling  = 2 x parameters / (tensor throughput x cards x share)

in fp16, with the shares that the logs of the RTX 3090 with Llama-2-7B show: 0.51 of its bandwidth (28.5 ms a token
where 936 GB/s would read 13.5 GB in 14.4 ms), 0.54 of its throughput (0.35 ms a token where 71 TFLOPS would take
0.19 ms). Several cards (tensor parallelism) are taken at 0.8 of their sum for what they tell each other. So these are
estimates of one software's efficiency carried to other hardware; calibrate what you have (`teola calibrate`).

Data sheets of NVIDIA (dense fp16 with fp32 accumulation; memory): RTX 3090 71 TFLOPS, 936 GB/s; A800 and A100 80 GB
SXM 312 TFLOPS, 2,039 GB/s; H100 SXM 989 TFLOPS, 3,350 GB/s. Models: Llama-2-7B 6.74, 13B 13.0, LLaMA-30B 32.5,
Llama-3.1-8B 8.03, 70B 70.6 thousand million parameters. Embedder, reranker and store are those of the RTX 3090; their
GPU curves beyond the fixed part shrink with the card's throughput.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from teola_plugin.engines import profiles
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind

_K = PrimitiveKind
_BANDWIDTH_SHARE, _THROUGHPUT_SHARE, _PARALLEL_SHARE = 0.51, 0.54, 0.8


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet: operations a second (dense fp16), bytes a second, bytes of memory."""

    throughput: float
    bandwidth: float
    memory: float


RTX_3090 = Card(71e12, 936e9, 24e9)
A100 = Card(312e12, 2039e9, 80e9)
H100 = Card(989e12, 3350e9, 80e9)


@dataclass(frozen=True, slots=True)
class LlmSize:
    """An LLM: parameters, and bytes of keys and values that a token takes in fp16 (2 x 2 x layers x KV heads x 128)."""

    parameters: float
    token_bytes: int


LLAMA2_7B = LlmSize(6.74e9, 4 * 32 * 32 * 128)
LLAMA2_13B = LlmSize(13.0e9, 4 * 40 * 40 * 128)
LLAMA_30B = LlmSize(32.5e9, 4 * 60 * 52 * 128)
LLAMA3_8B = LlmSize(8.03e9, 4 * 32 * 8 * 128)
LLAMA3_70B = LlmSize(70.6e9, 4 * 80 * 8 * 128)


def llm(model: LlmSize, card: Card, cards: int = 1) -> EngineProfile:
    """Return the profile of a model on so many cards. Raise ValueError if the weights alone do not fit."""
    room = 0.9 * card.memory * cards - 2 * model.parameters
    if room <= 0:
        raise ValueError(f"{2 * model.parameters / 1e9:.0f} GB of weights do not fit on {cards} cards")
    scale = cards if cards == 1 else _PARALLEL_SHARE * cards
    decoding = 2 * model.parameters / (card.bandwidth * scale * _BANDWIDTH_SHARE)
    prefilling = 2 * model.parameters / (card.throughput * scale * _THROUGHPUT_SHARE)
    curves = {_K.PREFILLING: Curve.linear(0.0, prefilling), _K.DECODING: Curve.linear(0.0, decoding)}
    base = profiles.rtx3090()["llm"]
    verifying = profiles.on_gpu(decoding, prefilling)
    return replace(base, curves=curves, verifying=verifying, cache_tokens=int(room / model.token_bytes))


def machine(model: LlmSize, card: Card, cards: int = 1) -> dict[str, EngineProfile]:
    """Return the profiles of an LLM on these cards, an embedder and a reranker on one such card each, and pgvector.

    The LLM's profile is computed; embedder and reranker are measured ones of an RTX 3090, scaled by throughput. That of
    pgvector, which uses no card, stays.
    """
    base = profiles.rtx3090()
    share = RTX_3090.throughput / card.throughput
    faster = {name: replace(base[name], curves=_faster(base[name], share)) for name in ("embedder", "reranker")}
    return {**base, **faster, "llm": llm(model, card, cards)}


def _faster(profile: EngineProfile, share: float) -> dict[PrimitiveKind, Curve]:
    """Return curves whose variable part is `share` of the original: the fixed part is launching, not computing."""
    return {
        kind: Curve(tuple((size, curve(0) + share * (seconds - curve(0))) for size, seconds in curve.points))
        for kind, curve in profile.curves.items()
    }


MACHINES: dict[str, Callable[[], dict[str, EngineProfile]]] = {
    "rtx3090": profiles.rtx3090,
    "rtx3090-13b": partial(machine, LLAMA2_13B, RTX_3090, 2),
    "a800-30b": partial(machine, LLAMA_30B, A100, 2),
    "a100-8b": partial(machine, LLAMA3_8B, A100),
    "a100-70b": partial(machine, LLAMA3_70B, A100, 4),
    "h100-8b": partial(machine, LLAMA3_8B, H100),
    "h100-70b": partial(machine, LLAMA3_70B, H100, 2),
    "noop": profiles.noop,
}
"""Machines by the name for `teola simulate --machine`; the first is Llama-2-7B on one RTX 3090."""
