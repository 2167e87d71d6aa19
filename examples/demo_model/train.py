"""Trains the language model: an hour and a half on two cores, minutes on a GPU.

python -m examples.demo_model.train --out FOLDER --steps 4500
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from examples.demo_model import model as models
from examples.demo_model.tasks import Example, examples

SEED = 1
TOKENS_A_BATCH = 7_000
PEAK, WARM_UP, COOL_DOWN = 2e-3, 100, 0.25
SHORT, LONG, SHORT_UNTIL = 288, 800, 0.85
"""Most tokens of an example before and after this share of the training."""
PROMPT_WEIGHT = 0.25
"""Share of the prompt's tokens that are learned from, too."""
CHOOSING, CHOOSING_WEIGHT = 8, 3.0
"""The first tokens of an answer choose the sentence, the others copy it: they count for more."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def encode(tokenizer: Any, example: Example) -> tuple[list[int], int]:
    """Token ids, and where the answer starts."""
    messages = [{"role": "system", "content": example.system}] if example.system else []
    messages.append({"role": "user", "content": example.user})
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(asked, add_special_tokens=False).input_ids
    answer = tokenizer(example.answer, add_special_tokens=False).input_ids
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def batches(tokenizer: Any, seed: int, longest: int) -> Iterator[Batch]:
    """(ids, next ids, weights), each [rows, tokens]; rows of about one length, TOKENS_A_BATCH together."""
    source, rng = examples(seed), random.Random(seed)
    while True:
        pool = [one for one in (encode(tokenizer, next(source)) for _ in range(400)) if len(one[0]) <= longest]
        pool.sort(key=lambda one: len(one[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for one in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(one[0]) > TOKENS_A_BATCH:
                groups.append([])
            groups[-1].append(one)
        rng.shuffle(groups)
        for group in groups:
            yield _batch(group, tokenizer.pad_token_id)


def _batch(group: list[tuple[list[int], int]], pad: int) -> Batch:
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), pad)
    weights = torch.zeros(len(group), width)
    for row, (one, start) in enumerate(group):
        ids[row, : len(one)] = torch.tensor(one)
        weights[row, 1 : len(one)] = PROMPT_WEIGHT
        weights[row, start : len(one)] = 1.0
        weights[row, start : min(start + CHOOSING, len(one))] = CHOOSING_WEIGHT
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]


def loss_of(model: Any, batch: Batch, device: str) -> tuple[torch.Tensor, float]:
    """The loss, and the share of answer tokens that come out right."""
    ids, wanted, weights = (part.to(device) for part in batch)
    kept = torch.rand_like(weights) < weights  # logits are a third of the work: only for what counts
    with torch.autocast(device, torch.bfloat16):
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state[kept])
    logits, wanted = logits.float(), wanted[kept]
    with torch.no_grad():
        answers = weights[kept] >= 1.0
        right = float((logits.argmax(-1) == wanted)[answers].float().mean())
    each = nn.functional.cross_entropy(logits, wanted, reduction="none")
    return (each * weights[kept].clamp(min=1.0)).mean(), right


def rate(step: int, progress: float) -> float:
    """Warm-up by steps, then level, then down to a twentieth in the last COOL_DOWN of the steps."""
    warm = min(1.0, (step + 1) / WARM_UP)
    left = min(1.0, max(0.0, 1.0 - progress) / COOL_DOWN)
    return PEAK * warm * (0.05 + 0.95 * 0.5 * (1 - math.cos(math.pi * left)))


def train(out: Path, steps: int, resume: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    state = out / "training.pt"
    resume = resume and state.is_file()
    tokenizer = AutoTokenizer.from_pretrained(out) if resume else models.train_tokenizer(SEED)
    model = models.new_llm(tokenizer).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.97), eps=1e-8)
    step = 0
    if resume:
        held = torch.load(state, weights_only=True)
        model.load_state_dict(held["model"])
        optimiser.load_state_dict(held["optimiser"])
        step = held["step"]
    out.mkdir(parents=True, exist_ok=True)
    source, longest = iter(()), 0
    seen, tokens, began = [], 0, time.perf_counter()
    saved = began
    while step < steps:
        progress = step / steps
        wanted = SHORT if progress < SHORT_UNTIL else LONG
        if wanted != longest:
            source, longest = batches(tokenizer, SEED + step, wanted), wanted
            model.set_attn_implementation("eager" if wanted == SHORT else "sdpa")  # which is quicker there
        batch = next(source)
        loss, right = loss_of(model, batch, device)
        for group in optimiser.param_groups:
            group["lr"] = rate(step, progress)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        now = time.perf_counter()
        seen.append((loss.item(), right))
        tokens += batch[0].numel()
        if step % 50 == 0:
            mean = [sum(values) / len(values) for values in zip(*seen, strict=True)]
            print(
                f"{step} {(now - began) / 60:.1f} min loss {mean[0]:.3f} right {mean[1]:.3f} tokens {tokens}",
                flush=True,
            )
            seen = []
        if now - saved > 240:
            saved = now
            torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, state)
            models.save(model, tokenizer, out)
    models.save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo's language model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its checkpoints")
    parser.add_argument("--steps", type=int, default=4500, help="steps of 7,000 tokens in all (default 4500)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    given = parser.parse_args()
    train(given.out, given.steps, given.resume)


if __name__ == "__main__":
    main()
