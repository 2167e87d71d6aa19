"""A small randomly initialised cross encoder, made on first use: real reranking work without a model hub.

Its scores mean nothing but are deterministic, spread between 0 and 1, and depend on the query and the text. The same
bytes come out on every machine: weights are drawn by numpy and the vocabulary does not depend on hash order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.model_cache import cache_folder, made_once

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

VERSION = 2
"""Part of the folder name; raise it whenever other weights or another tokenizer would be made."""

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, as in `BertConfig`. `context` is in tokens."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    intermediate: int = 256
    vocab: int = 2048
    context: int = 512


def make(folder: Path | str | None = None) -> Path:
    """Return the folder of the model in the usual Hugging Face layout. Make it unless it exists.

    `folder`: None is a folder in the package's cache, with the model's version in its name.
    """
    target = Path(folder) if folder is not None else cache_folder() / f"tiny-reranker-v{VERSION}"
    return made_once(target, "config.json", _write)


def _write(folder: Path) -> None:
    """Write weights, tokenizer and configuration of the cross encoder into an empty folder."""
    from safetensors.numpy import save_file

    shape = Shape()
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    save_file(dict(_weights(shape)), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", _config(shape)), ("tokenizer_config.json", _tokenizer_config(shape))):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer(vocab: int) -> Tokenizer:
    """Return a lower-case WordPiece tokenizer with BERT's layout of a pair."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece(_train_vocabulary(vocab), unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)],
    )
    return tokenizer


def _train_vocabulary(size: int) -> dict[str, int]:
    """Return a vocabulary, trained on the help texts that come with Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    texts = [topics[name] for name in sorted(topics)]
    learner = Tokenizer(models.WordPiece(unk_token=UNK))
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer numbers the inner letters in random order, and breaks ties by number, unless they are given.
    letters = [f"##{letter}" for letter in sorted(set("".join(texts).lower())) if not letter.isspace()]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=[*SPECIAL, *letters], show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return dict(sorted(learner.get_vocab().items(), key=lambda item: item[1]))


def _weights(shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by name. Scales are such that attention is far from uniform and scores are far from 0.5."""
    import numpy as np

    random = np.random.default_rng(0)
    wide, deep = shape.hidden**-0.5, shape.intermediate**-0.5

    def linear(name: str, outputs: int, inputs: int, std: float) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{name}.weight", (random.standard_normal((outputs, inputs)) * std).astype(np.float32)
        yield f"{name}.bias", np.zeros(outputs, np.float32)

    def norm(name: str) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{name}.weight", np.ones(shape.hidden, np.float32)
        yield f"{name}.bias", np.zeros(shape.hidden, np.float32)

    at = "bert.embeddings"
    for name, rows, std in (("word", shape.vocab, 1.0), ("position", shape.context, 0.2), ("token_type", 2, 0.5)):
        table = random.standard_normal((rows, shape.hidden)) * std
        yield f"{at}.{name}_embeddings.weight", table.astype(np.float32)
    yield from norm(f"{at}.LayerNorm")
    for i in range(shape.layers):
        at = f"bert.encoder.layer.{i}"
        for name, std in (("query", 2.0), ("key", 2.0), ("value", 1.0)):
            yield from linear(f"{at}.attention.self.{name}", shape.hidden, shape.hidden, std * wide)
        yield from linear(f"{at}.attention.output.dense", shape.hidden, shape.hidden, 2.0 * wide)
        yield from norm(f"{at}.attention.output.LayerNorm")
        yield from linear(f"{at}.intermediate.dense", shape.intermediate, shape.hidden, wide)
        yield from linear(f"{at}.output.dense", shape.hidden, shape.intermediate, 1.5 * deep)
        yield from norm(f"{at}.output.LayerNorm")
    yield from linear("bert.pooler.dense", shape.hidden, shape.hidden, wide)
    yield from linear("classifier", 1, shape.hidden, 2.0 * wide)


def _config(shape: Shape) -> dict[str, Any]:
    """Return the content of the model's `config.json`, as Hugging Face's `BertConfig` reads it."""
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": SPECIAL.index(PAD),
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "torch_dtype": "float32",
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **dict(zip(names, SPECIAL, strict=True)),
    }
