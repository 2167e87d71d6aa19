"""What the bundled models can: six scores between 0 and 1, on a seed and on questions that were not trained on.

python -m examples.demo_model.evaluate --json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from examples.demo_model import prose, tasks
from examples.demo_model.handwritten import ASKED, Asked
from examples.demo_model.tasks import Example
from teola_plugin.adapters import demo_app as prompts
from teola_plugin.engines import model_cache as bundled
from teola_plugin.observe import progress

SEED = 20_000_003
CHUNK, OVERLAP = 1024, 120
"""Characters, as the demo cuts its documents."""

Generate = Callable[[Sequence[Example]], list[str]]


def generator(folder: Path, batch: int = 20, tokens: int = 120) -> Generate:
    """Greedy decoding in transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(examples: Sequence[Example]) -> list[str]:
        found = []
        with progress(len(examples), examples[0].skill) as bar, torch.no_grad():
            for at in range(0, len(examples), batch):
                group = [messages(example) for example in examples[at : at + batch]]
                asked = tokenizer.apply_chat_template(group, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
                made = model.generate(
                    ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=tokens, do_sample=False
                )
                found += tokenizer.batch_decode(made[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
                bar.advance(len(group))
        return found

    return generate


def messages(example: Example) -> list[dict[str, str]]:
    system = [{"role": "system", "content": example.system}] if example.system else []
    return [*system, {"role": "user", "content": example.user}]


def held_out(make: Callable[[random.Random], Example], count: int) -> list[Example]:
    rng = random.Random(SEED)
    return [make(rng) for _ in range(count)]


def passage_for(asked: Asked) -> str:
    """The chunk of the topic that holds the answer, as the demo would cut it."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(chunk_size=CHUNK, chunk_overlap=OVERLAP)
    chunks = splitter.split_text(prose.topic(asked.topic))
    return next(chunk for chunk in chunks if asked.expected in chunk)


def written(count: int) -> list[Example]:
    user = "Question: {question}\n\nPassage:\n{context}\n\nAnswer:"
    return [
        Example(
            "handwritten", prompts.INSTRUCTION, user.format(question=a.question, context=passage_for(a)), a.expected
        )
        for a in ASKED[:count]
    ]


def share(results: Sequence[bool]) -> float:
    return sum(results) / len(results)


def contained(examples: Sequence[Example], outputs: Sequence[str]) -> float:
    """The wanted words stand in the output."""
    return share([e.answer.rstrip(".").lower() in out.lower() for e, out in zip(examples, outputs, strict=True)])


def distinct_questions(examples: Sequence[Example], outputs: Sequence[str]) -> float:
    """As many as were asked for, no two alike."""
    return share([_distinct(out, len(_items(e.answer))) for e, out in zip(examples, outputs, strict=True)])


def _distinct(output: str, wanted: int) -> bool:
    try:
        items = _items(output)
    except ValueError:
        return False
    return len(items) == len(set(items)) == wanted and all(isinstance(item, str) and item.strip() for item in items)


def _items(output: str) -> list[str]:
    return list(json.loads(output)) if output.lstrip().startswith("[") else output.strip().split("\n")


def right_tools(examples: Sequence[Example], outputs: Sequence[str]) -> float:
    """JSON that names the right tool."""

    def right(example: Example, output: str) -> bool:
        try:
            return bool(json.loads(output)["name"] == json.loads(example.answer)["name"])
        except (ValueError, TypeError, KeyError):
            return False

    return share([right(e, out) for e, out in zip(examples, outputs, strict=True)])


def reranked(folder: Path, count: int) -> float:
    """How often the relevant passage comes first among four."""
    from sentence_transformers import CrossEncoder

    from examples.demo_model.train_reranker import choice

    rng = random.Random(SEED)
    model = CrossEncoder(str(folder))
    chosen = [choice(rng, rng.choice((250, 500, 1000))) for _ in range(count)]
    pairs = [(c.question, text) for c in chosen for text in c.passages]
    scores = iter(model.predict(pairs, show_progress_bar=False))
    ranked = ([float(next(scores)) for _ in c.passages] for c in chosen)
    return share([first > max(others) for first, *others in ranked])  # a tie is no success


def evaluate(llm: Path, reranker: Path, count: int) -> dict[str, float]:
    """The six scores, over `count` examples each (fewer handwritten ones, of which there are forty)."""
    generate = generator(llm)
    cases: dict[str, tuple[list[Example], Callable[[Sequence[Example], Sequence[str]], float]]] = {
        "answers_generated": (held_out(partial(tasks.qa_facts, subjects=4), count), contained),
        "answers_handwritten": (written(count), contained),
        "expansions": (held_out(tasks.expand, count), distinct_questions),
        "judge": (held_out(tasks.judge, count), contained),
        "tool_calls": (held_out(tasks.tool_call, count), right_tools),
    }
    scores = {name: score(examples, generate(examples)) for name, (examples, score) in cases.items()}
    return scores | {"reranker": reranked(reranker, count)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates the demo's language model and reranker.")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object, and nothing else")
    parser.add_argument("--llm", type=Path, help="folder of the language model (default: the bundled one)")
    parser.add_argument("--reranker", type=Path, help="folder of the reranker (default: the bundled one)")
    parser.add_argument("--count", type=int, default=200, help="examples for each score (default 200)")
    given = parser.parse_args()
    scores = evaluate(given.llm or bundled.llm_folder(), given.reranker or bundled.reranker_folder(), given.count)
    if given.json:
        json.dump(scores, sys.stdout)
        sys.stdout.write("\n")
    else:
        for name, score in scores.items():
            print(f"{name:20} {score:.3f}")


if __name__ == "__main__":
    main()
