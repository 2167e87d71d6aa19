"""A small randomly initialised Llama, made on first use: real vLLM work without a model hub.

Its answers are nonsense but printable, deterministic, and depend on the whole prompt. Needs numpy, tokenizers and
safetensors, all of which vLLM brings along; neither torch nor a network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.model_cache import cache_folder, made_once

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

VERSION = 1
"""Part of the folder name; raise it whenever the same arguments would give other weights or another tokenizer."""

BOS, EOS, PAD = "<s>", "<|end|>", "<pad>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_NEVER, _RARELY = -60.0, -4.0
_QUOTE = 3.3
"""Logit of a closing quote above a word's, so that strings under a JSON schema come to an end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, as in `LlamaConfig`. `context` is in tokens."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 704
    vocab: int = 2048
    context: int = 4096
    seed: int = 0

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def default_folder(shape: Shape = Shape()) -> Path:
    """Return the folder of the model of this shape, in the user's cache folder (`XDG_CACHE_HOME`)."""
    return cache_folder() / "-".join(["tiny-llama", f"v{VERSION}", *map(str, asdict(shape).values())])


def make(folder: Path | str | None = None, shape: Shape = Shape()) -> Path:
    """Return the folder of the model in the usual Hugging Face layout. Make it unless it exists.

    Two processes may call this at once: the folder appears complete or not at all.
    """
    target = Path(folder) if folder is not None else default_folder(shape)
    return made_once(target, "config.json", lambda building: _write(building, shape))


def _write(folder: Path, shape: Shape) -> None:
    """Write weights, tokenizer and configuration of a model of this shape into an empty folder."""
    from safetensors.numpy import save_file

    tokenizer = _train_tokenizer(shape.vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(dict(_weights(shape, _bias(tokenizer, shape))), folder / "model.safetensors", metadata={"format": "pt"})
    ids: dict[str, int] = {name: SPECIAL.index(name) for name in (BOS, EOS, PAD)}  # the trainer numbers them first
    for name, content in (
        ("config.json", _config(shape, ids)),
        ("tokenizer_config.json", _tokenizer_config(shape)),
        ("generation_config.json", {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _train_tokenizer(vocab: int) -> Tokenizer:
    """Return a byte-level BPE, trained on the help texts that come with Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    start = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, start)]
    )
    return tokenizer


def _bias(tokenizer: Tokenizer, shape: Shape) -> np.ndarray:
    """Return the bias of every token's logit, [vocab]: words are likely, blanks rare, unprintable text impossible."""
    import numpy as np

    bias = np.full(shape.vocab, _NEVER, dtype=np.float32)
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=True)
        if not text.isascii() or not (text.strip() and text.isprintable()):
            continue
        bias[token] = 0.0 if text.strip().isalnum() else _RARELY
        if text in ('"', "]", "}"):
            bias[token] = _QUOTE if text == '"' else 0.0
    return bias


def _weights(shape: Shape, bias: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by name.

    Llama has no bias on its logits; hidden dimension 0 makes one: every embedding holds the same constant there and no
    layer writes to it, so row `t` of the head adds `bias[t]` when its column 0 is that over the constant's final value.
    """
    import numpy as np

    random = np.random.default_rng(shape.seed)

    def normal(*size: int, std: float) -> np.ndarray:
        return (random.standard_normal(size) * std).astype(np.float32)

    wide = shape.hidden**-0.5
    embedding = normal(shape.vocab, shape.hidden, std=1.0)
    embedding[:, 0] = 4.0
    yield "model.embed_tokens.weight", embedding
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        yield at + "self_attn.q_proj.weight", normal(shape.hidden, shape.hidden, std=1.5 * wide)
        yield at + "self_attn.k_proj.weight", normal(shape.kv_heads * shape.head, shape.hidden, std=1.5 * wide)
        yield at + "self_attn.v_proj.weight", normal(shape.kv_heads * shape.head, shape.hidden, std=wide)
        outputs = {
            "self_attn.o_proj.weight": normal(shape.hidden, shape.hidden, std=2.0 * wide),
            "mlp.down_proj.weight": normal(shape.hidden, shape.intermediate, std=1.5 * shape.intermediate**-0.5),
        }
        for name, tensor in outputs.items():
            tensor[0] = 0.0
            yield at + name, tensor
        yield at + "mlp.gate_proj.weight", normal(shape.intermediate, shape.hidden, std=wide)
        yield at + "mlp.up_proj.weight", normal(shape.intermediate, shape.hidden, std=wide)
        yield at + "input_layernorm.weight", np.ones(shape.hidden, np.float32)
        yield at + "post_attention_layernorm.weight", np.ones(shape.hidden, np.float32)
    yield "model.norm.weight", np.ones(shape.hidden, np.float32)
    head = normal(shape.vocab, shape.hidden, std=1.5 * wide)
    head[:, 0] = bias  # the constant is about 1 after the last normalisation
    yield "lm_head.weight", head


def _config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    """Return the content of the model's `config.json`, as Hugging Face's `LlamaConfig` reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
