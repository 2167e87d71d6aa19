"""The two models before training: sizes, tokenizers, files in the usual Hugging Face layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from examples.demo_model import prose, tasks
from teola_plugin.engines.tiny_llama import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL

VOCABULARY, CONTEXT = 2048, 4096
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 5, 256, 4, 2, 704
RERANKER_VOCABULARY, RERANKER_CONTEXT = 4096, 512


def train_tokenizer(seed: int) -> Any:
    """A byte-level BPE of generated and real text, for transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made = itertools.islice(tasks.examples(seed), 4000)
    texts = itertools.chain(prose.documents().values(), (f"{e.user}\n{e.answer}" for e in made))
    tokenizer.train_from_iterator(texts, trainer)
    start = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, start)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_llm(tokenizer: Any) -> Any:
    """A `LlamaForCausalLM` with fresh weights: 4 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def new_reranker() -> Any:
    """A `BertForSequenceClassification` with fresh weights: 2 million parameters."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=RERANKER_VOCABULARY,
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=512,
        max_position_embeddings=RERANKER_CONTEXT,
        num_labels=1,
    )
    return BertForSequenceClassification(config)


def train_reranker_tokenizer(seed: int) -> Any:
    """A lower-case WordPiece, for transformers."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    made = itertools.islice(tasks.examples(seed), 4000)
    texts = itertools.chain(prose.documents().values(), (e.user for e in made))
    learner = BertWordPieceTokenizer(lowercase=True)
    letters = sorted(
        {character for text in prose.documents().values() for character in text.lower() if character.isascii()}
    )
    learner.train_from_iterator(
        texts,
        vocab_size=RERANKER_VOCABULARY,
        min_frequency=2,
        limit_alphabet=200,
        initial_alphabet=letters,
        show_progress=False,
    )
    return BertTokenizerFast(tokenizer_object=learner._tokenizer, do_lower_case=True, model_max_length=RERANKER_CONTEXT)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """In bfloat16, as transformers and vLLM load it."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    make_portable(folder)


def make_portable(folder: Path) -> None:
    """Settings that transformers 4 and 5 and vLLM understand alike.

    Stored in 16 bits for its size, computed in float32, in which batching changes no answer.
    """
    _change(folder / "config.json", {"dtype": "float32", "torch_dtype": "float32"})
    template = folder / "chat_template.jinja"
    held = {"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {}
    _change(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | held)
    template.unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)


def _change(path: Path, values: dict[str, Any]) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
