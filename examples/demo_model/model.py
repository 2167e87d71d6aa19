"""The two models before training: sizes, tokenizers, files in the usual Hugging Face layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from examples.demo_model import prose, tasks
from teola_plugin.engines.bundled.llama import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL

VOCABULARY, CONTEXT = 2048, 4096
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 8, 256, 4, 2, 704
FIRST_LAYERS = 5
"""The training begins with so many layers and grows (`grown`)."""
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


def grown(small: Any, tokenizer: Any) -> Any:
    """A `LlamaForCausalLM` of `LAYERS` layers that says what `small`, with fewer, says: the new layers stand between
    the old ones and add nothing yet (Net2Net, Chen et al. 2016)."""
    import torch

    large = new_llm(tokenizer, LAYERS)
    old = small.config.num_hidden_layers
    places = [round((number + 1) * LAYERS / old) - 1 for number in range(old)]
    state = {key: tensor for key, tensor in small.state_dict().items() if ".layers." not in key}
    for number, place in enumerate(places):
        start, end = f"model.layers.{number}.", f"model.layers.{place}."
        state |= {end + key.removeprefix(start): t for key, t in small.state_dict().items() if key.startswith(start)}
    large.load_state_dict(state, strict=False)
    with torch.no_grad():
        for place in set(range(LAYERS)) - set(places):
            layer = large.model.layers[place]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return large


def new_llm(tokenizer: Any, layers: int = FIRST_LAYERS) -> Any:
    """A `LlamaForCausalLM` with fresh weights: 4 million parameters with 5 layers, 6 with 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
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


def new_reranker(tokenizer: Any) -> Any:
    """A `BertForSequenceClassification` that starts as a lexical matcher: 0.9 million parameters.

    Layer 1 starts by looking every token up in the other
    segment, and layer 2 by averaging over the question what was found, rare words first. Training goes on from there.
    """
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=RERANKER_VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=256,
        max_position_embeddings=RERANKER_CONTEXT,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    _match_words(model, _rarity(tokenizer))
    return model


_WORD = slice(0, 120)
_SEGMENT, _RARE, _FOUND, _SCORE = 120, 121, 122, 124
"""Dimensions of the start: a word's own vector, its segment, its rarity, whether it was found, the result."""


def _match_words(model: Any, rarity: Any) -> None:
    import torch

    bert, at = model.bert, torch.arange(120)
    with torch.no_grad():
        for table in (bert.embeddings.position_embeddings, bert.embeddings.token_type_embeddings):
            table.weight.zero_()
        words = bert.embeddings.word_embeddings.weight
        words.zero_()
        words[:, _WORD] = torch.randint(0, 2, (len(words), 120)).float() * 2 - 1
        words[:, _RARE] = rarity
        bert.embeddings.token_type_embeddings.weight[:, _SEGMENT] = torch.tensor([-1.0, 1.0])
        for layer in bert.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
                part.weight.zero_()
            layer.attention.output.dense.weight.zero_()
            layer.output.dense.weight.zero_()
        look, gather = (layer.attention for layer in bert.encoder.layer)
        look.self.query.weight[at, at] = look.self.key.weight[at, at] = 1.06
        look.self.query.weight[_SEGMENT, _SEGMENT], look.self.key.weight[_SEGMENT, _SEGMENT] = 4.75, -4.75
        look.self.value.weight[_SEGMENT, _SEGMENT] = 1.0
        look.output.dense.weight[_FOUND, _SEGMENT] = 1.0
        gather.self.query.bias[_SEGMENT], gather.self.query.bias[_RARE] = -60.0, 28.0
        for dimension in (_SEGMENT, _RARE):
            gather.self.key.weight[dimension, dimension] = 1.0
        gather.self.value.weight[_FOUND, _FOUND] = 1.0
        gather.output.dense.weight[_SCORE, _FOUND] = 1.0
        bert.pooler.dense.weight[_SCORE] = 0.0
        bert.pooler.dense.weight[_SCORE, _SCORE] = 1.0
        model.classifier.weight[0, _SCORE] = 4.0


def _rarity(tokenizer: Any) -> Any:
    """For each token, from -1 (in every text) to 1 (in none)."""
    import torch

    texts = [text[at : at + 500] for text in prose.documents().values() for at in range(0, len(text), 500)]
    texts += [example.user for example in itertools.islice(tasks.examples(0), 1000)]
    held = torch.ones(RERANKER_VOCABULARY)
    for ids in tokenizer(texts, truncation=True).input_ids:
        held[list(set(ids))] += 1
    rare = torch.log(len(texts) / held)
    return (2 * rare / rare.max() - 1).clamp(-1, 1)


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
    held: dict[str, Any] = {"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {}
    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "bert":
        held["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # not told by default
    _change(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | held)
    template.unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)


def _change(path: Path, values: dict[str, Any]) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
