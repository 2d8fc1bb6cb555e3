"""A small untrained model with words of one's own, for environments that are tried on a laptop.

    tiny_model("model", ["How many Bolts are there?", "There are 1240."], tools=["stock"])

A directory of Hugging Face's form: a Qwen3 of about half a million parameters, and a tokenizer
whose words are those of the texts. It knows nothing: a cold start teaches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.errors import ConfigError
from agentenv.install import install_hint
from agentenv.tags import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Lower-case words and signs absorb the spaces around them, so that a name is the same token
# wherever it stands; digits go in pairs, and what stands between names and values of an object of
# JSON is one token. All of it shortens the traces and makes copying easy to learn.
PIECE = r"\\boxed\{| ?[a-z]+ ?| ?[A-Z][a-z]+|[0-9]{1,2}| [*+-] |\{\"|\": \"|\": |\", \"|, \"|\"\}"


def tiny_model(
    path: str | Path,
    texts: Iterable[str],
    seed: int = 0,
    *,
    tools: Iterable[str] = (),
    words: Iterable[str] = (),
    max_tokens: int = 1024,
    hidden_size: int = 128,
    num_layers: int = 2,
) -> Path:
    """Writes model and tokenizer to the folder `path`, and gives it back.

    Every word of `texts`, and each of `words` as it is, becomes a token, and so do the tags of
    `tools`; what they lack is spelled in bytes. So the texts should hold what questions, tools and
    demonstrations say. `max_tokens` is the longest sequence, prompt included. Equal arguments give
    equal files. Needs the extra `train`. Raises ConfigError.
    """
    tokenizer = tiny_tokenizer(texts, tools=tools, words=words, max_tokens=max_tokens)
    _write_model(Path(path), tokenizer, seed, max_tokens, hidden_size, num_layers)
    return Path(path)


def tiny_tokenizer(
    texts: Iterable[str],
    *,
    tools: Iterable[str] = (),
    words: Iterable[str] = (),
    max_tokens: int = 1024,
) -> PreTrainedTokenizerFast:
    """Word-level where the texts have words, bytes for the rest: any text survives a round trip.

    The tags are ordinary tokens (they stay in decoded text), the chat markers special ones.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"tiny_model needs the package {error.name}, which is missing: {install_hint('train')}"
        ) from error

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
        "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text))
        for text in _pieces(texts, words)
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECE), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (PAD, START, END)])
    first, *rest = TAGS
    tags = [text for tag in (first, *tools, *rest) for text in (f"<{tag}>", f"</{tag}>")]
    backend.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def _pieces(texts: Iterable[str], words: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str):
        raise ConfigError("tiny_model: texts is one text; expected a list of them")
    yield from words
    yield from (f"{number:02d}" for number in range(100))
    found = {"user", "assistant"}
    for text in texts:
        found.update(re.findall(PIECE, text))
    yield from sorted(found)


def _write_model(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    max_tokens: int,
    hidden_size: int,
    num_layers: int,
) -> None:
    """Head size 64 is one that every serving engine has kernels for. The output head is a tensor
    of its own (tied weights are not reloaded correctly by vLLM on CPU), but starts equal to the
    embedding: copying a token then works before its output row has been trained.
    """
    try:
        import torch
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"tiny_model needs the package {error.name}, which is missing: {install_hint('train')}"
        ) from error

    logging.disable_progress_bar()
    ids: Mapping[str, int] = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.generation_config = GenerationConfig(eos_token_id=ids[END], pad_token_id=ids[PAD])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
