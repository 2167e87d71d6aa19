"""A small randomly initialised cross-encoder, made on first use: real reranking work without a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from teola_plugin.engines.model_cache import cache_folder, made_once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = 1
"""Part of the folder name; raise it whenever other weights or another tokenizer would be made."""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make(folder: Path | str | None = None) -> Path:
    """Folder of the model in the usual Hugging Face layout (`CrossEncoder` loads it); made if it is not there."""
    target = Path(folder) if folder is not None else cache_folder() / f"tiny-reranker-v{VERSION}"
    return made_once(target, "config.json", _write)


def _write(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=512,
    )
    config = BertConfig(
        vocab_size=2048,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        num_labels=1,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Tokenizer:
    """A lower-casing WordPiece trained on the help texts that come with Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=2048, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    marks = [(mark, SPECIAL.index(mark)) for mark in ("[SEP]", "[CLS]")]  # the trainer numbers them first
    tokenizer.post_processor = processors.BertProcessing(*marks)
    return tokenizer
