"""Trains the language model: some hours on two cores, minutes on a GPU. First a small one, then one that grew of it.

python -m examples.demo_model.train --out SMALL --steps 11000
python -m examples.demo_model.train --out FOLDER --grow SMALL --steps 8000 --peak 6e-4
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_model import model as models
from examples.demo_model.tasks import Example, examples

SEED = 1
TOKENS_A_BATCH = 4_000
WARM_UP = 50
SHORT, LONG, SHORT_UNTIL = 288, 800, 0.4
"""Most tokens of an example before and after this share of the training."""
PROMPT_WEIGHT = 0.25
"""Share of the prompt's tokens that are learned from, too."""
CHOOSING = (6.0, 6.0, 3.0, 3.0, 3.0, 3.0)
"""What the first tokens of an answer count for: they choose the sentence, the others copy it."""
LOOKED_UP = (6.0, 3.0)
"""The same for the first tokens of a value, which are looked up, where the words before it come from the question."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


Encoded = tuple[list[int], list[float]]


def encode(tokenizer: Any, example: Example) -> Encoded:
    """Token ids, and what each counts for."""
    messages = [{"role": "system", "content": example.system}] if example.system else []
    messages.append({"role": "user", "content": example.user})
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(asked, add_special_tokens=False).input_ids
    answer = tokenizer(example.answer, add_special_tokens=False, return_offsets_mapping=True)
    counts = [*CHOOSING, *[1.0] * len(answer.input_ids)][: len(answer.input_ids) + 1]
    if example.key:
        begins = example.answer.rindex(example.key)
        first = next(at for at, (_, end) in enumerate(answer.offset_mapping) if end > begins)
        counts[first : first + len(LOOKED_UP)] = LOOKED_UP
    return [*prompt, *answer.input_ids, tokenizer.eos_token_id], [PROMPT_WEIGHT] * len(prompt) + counts


def batches(tokenizer: Any, seed: int, longest: int) -> Iterator[Batch]:
    """(ids, next ids, weights), each [rows, tokens]; rows of about one length, TOKENS_A_BATCH together."""
    source, rng = examples(seed), random.Random(seed)
    while True:
        pool = [one for one in (encode(tokenizer, next(source)) for _ in range(400)) if len(one[0]) <= longest]
        pool.sort(key=lambda one: len(one[0]))
        groups: list[list[Encoded]] = [[]]
        for one in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(one[0]) > TOKENS_A_BATCH:
                groups.append([])
            groups[-1].append(one)
        rng.shuffle(groups)
        for group in groups:
            yield _batch(group, tokenizer.pad_token_id)


def _batch(group: list[Encoded], pad: int) -> Batch:
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), pad)
    weights = torch.zeros(len(group), width)
    for row, (one, counts) in enumerate(group):
        ids[row, : len(one)] = torch.tensor(one)
        weights[row, 1 : len(one)] = torch.tensor(counts[1:])
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]


def loss_of(body: Any, head: Any, batch: Batch, device: str) -> tuple[torch.Tensor, float]:
    """The loss, and the share of answer tokens that come out right."""
    ids, wanted, weights = (part.to(device) for part in batch)
    kept = torch.rand_like(weights) < weights  # logits are a third of the work: only for what counts
    with torch.autocast(device, torch.bfloat16):
        logits = head(body(input_ids=ids).last_hidden_state[kept])
    logits, wanted = logits.float(), wanted[kept]
    with torch.no_grad():
        answers = weights[kept] >= 1.0
        right = float((logits.argmax(-1) == wanted)[answers].float().mean())
    each = nn.functional.cross_entropy(logits, wanted, reduction="none")
    return (each * weights[kept].clamp(min=1.0)).mean(), right


def rate(step: int, progress: float, peak: float) -> float:
    """Warm-up by steps, then down to a twentieth along a cosine."""
    warm = min(1.0, (step + 1) / WARM_UP)
    return peak * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def begin(folder: Path | None, small: Path | None) -> tuple[Any, Any]:
    """Tokenizer and model: those in `folder`, or grown of those in `small`, or fresh ones."""
    if folder is None and small is None:
        tokenizer = models.train_tokenizer(SEED)
        return tokenizer, models.new_llm(tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder or small)
    model = AutoModelForCausalLM.from_pretrained(folder or small, dtype=torch.float32)
    return tokenizer, model if folder else models.grown(model, tokenizer)


def optimisers(model: Any, peak: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the embeddings and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or ".layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.97), eps=1e-8, weight_decay=0.0),
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long: `steps`, and `minutes` at most; and the highest learning rate."""

    steps: int
    minutes: float
    peak: float

    def progress(self, step: int, began: float) -> float:
        return max(step / self.steps, (time.perf_counter() - began) / 60 / self.minutes)


class Training:
    """A model in `out`, its optimisers, and where it stands."""

    def __init__(self, out: Path, resume: bool, grow: Path | None, peak: float, compiled: bool) -> None:
        self.out, self.state = out, out / "training.pt"
        resume = resume and self.state.is_file()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.seed = SEED + 1000 * (grow is not None)
        self.tokenizer, model = begin(out if resume else None, grow)
        self.model = model.to(self.device)
        self.body = torch.compile(self.model.model, dynamic=True) if compiled else self.model.model
        self.optimisers = optimisers(self.model, peak)
        self.step = 0
        if resume:
            self._load()

    def _load(self) -> None:
        held = torch.load(self.state, weights_only=True)
        self.model.load_state_dict(held["model"])
        for optimiser, state in zip(self.optimisers, held["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step = held["step"]

    def keep(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        held = {"model": self.model.state_dict(), "step": self.step}
        torch.save(held | {"optimisers": [one.state_dict() for one in self.optimisers]}, self.state)
        models.save(self.model, self.tokenizer, self.out)

    def advance(self, batch: Batch, lr: float) -> tuple[float, float]:
        """One step; its loss, and the share of answer tokens that came out right."""
        loss, right = loss_of(self.body, self.model.lm_head, batch, self.device)
        self.model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
        self.step += 1
        return loss.item(), right

    def batches(self, longest: int) -> Iterator[Batch]:
        self.model.set_attn_implementation("eager" if longest == SHORT else "sdpa")  # which is quicker there
        return batches(self.tokenizer, self.seed + self.step, longest)


def train(training: Training, plan: Plan) -> None:
    source: Iterator[Batch] = iter(())
    longest = 0
    seen: list[tuple[float, float]] = []
    began = saved = time.perf_counter()
    while (progress := plan.progress(training.step, began)) < 1:
        wanted = SHORT if progress < SHORT_UNTIL else LONG
        if wanted != longest:
            source, longest = training.batches(wanted), wanted
        seen.append(training.advance(next(source), rate(training.step, progress, plan.peak)))
        now = time.perf_counter()
        if len(seen) == 50:
            loss, right = (sum(values) / len(values) for values in zip(*seen, strict=True))
            print(f"{training.step} {(now - began) / 60:.1f} min loss {loss:.3f} right {right:.4f}", flush=True)
            seen = []
        if now - saved > 240:
            saved = now
            training.keep()
    training.keep()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's language model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its checkpoints")
    parser.add_argument("--steps", type=int, default=4500, help="steps of 4,000 tokens in all (default 4500)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--grow", type=Path, help="folder of a model with fewer layers to begin with")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate (default 0.002)")
    parser.add_argument("--compile", action="store_true", help="twice as fast; needs a C++ compiler on a CPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever the step")
    given = parser.parse_args()
    plan = Plan(given.steps, given.minutes, given.peak)
    train(Training(given.out, given.resume, given.grow, given.peak, given.compile), plan)


if __name__ == "__main__":
    main()
