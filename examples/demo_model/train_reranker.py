"""Trains the cross-encoder: a question and four passages, of which one holds the answer.

python -m examples.demo_model.train_reranker --out FOLDER --minutes 12
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.demo_model import facts, prose
from examples.demo_model import model as models

SEED = 2
PASSAGES, QUESTIONS_A_BATCH = 4, 10
LENGTHS = (150, 250, 500, 900)
"""Characters of a passage."""
PEAK = 2e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """A question and passages; the first one holds the answer."""

    question: str
    passages: tuple[str, ...]


def choice(rng: random.Random, length: int, passages: int = PASSAGES) -> Choice:
    """From generated facts or from real prose."""
    return _of_facts(rng, passages) if rng.random() < 0.45 else _of_prose(rng, length, passages)


def _of_facts(rng: random.Random, passages: int) -> Choice:
    paragraphs = facts.document(rng, passages + 1)
    asked = rng.choice(paragraphs[0])
    rest = [f.statement for f in paragraphs[0] if f is not asked]
    texts = [" ".join(f.statement for f in paragraph) for paragraph in paragraphs[1:]]
    if rest and rng.random() < 0.5:
        texts[0] = " ".join(rest)  # the right subject, the wrong fact
    whole = [asked.statement, *rest]
    rng.shuffle(whole)
    return Choice(rng.choice(asked.questions), (" ".join(whole), *texts[: passages - 1]))


def _of_prose(rng: random.Random, length: int, passages: int) -> Choice:
    found = prose.passage(rng, length)
    others = tuple(prose.other_passage(rng, found, length) for _ in range(passages - 1))
    return Choice(found.question, (found.text, *others))


def batches(tokenizer: Any, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    rng = random.Random(seed)
    while True:
        length = rng.choice(LENGTHS)
        chosen = [choice(rng, length) for _ in range(QUESTIONS_A_BATCH * (1 if length > 400 else 2))]
        pairs = [(c.question, text) for c in chosen for text in c.passages]
        yield tokenizer(pairs, padding=True, truncation=True, max_length=400, return_tensors="pt")


def _rate(step: int, progress: float) -> float:
    """Warm-up by steps, then down by time."""
    return PEAK * min(1.0, (step + 1) / 50) * max(0.02, 1 - progress)


def train(out: Path, minutes: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    tokenizer = models.train_reranker_tokenizer(SEED)
    model = models.new_reranker(tokenizer).to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.05)
    spent, since, seen = 0.0, time.perf_counter(), []
    source = batches(tokenizer, SEED)
    for step in itertools.count():
        progress = spent / (minutes * 60)
        if progress >= 1:
            break
        batch = {name: part.to(device) for name, part in next(source).items()}
        with torch.autocast(device, torch.bfloat16):
            logits = model(**batch).logits
        scores = logits.float().view(-1, PASSAGES)
        first = torch.zeros(len(scores), dtype=torch.long, device=device)
        wanted = nn.functional.one_hot(first, PASSAGES).float()
        ranked = nn.functional.cross_entropy(scores, first)
        judged = nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        for group in optimiser.param_groups:
            group["lr"] = _rate(step, progress)
        optimiser.zero_grad()
        (ranked + judged).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        seen.append(float((scores[:, :1] > scores[:, 1:]).all(-1).float().mean()))
        now = time.perf_counter()
        spent += min(now - since, 30.0)
        since = now
        if step % 25 == 24:
            print(f"{step + 1} {spent / 60:.1f} min first {sum(seen) / len(seen):.3f} norm {norm:.2f}", flush=True)
            seen = []
    models.save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's reranker.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=12.0, help="time to train (default 12)")
    given = parser.parse_args()
    train(given.out, given.minutes)


if __name__ == "__main__":
    main()
