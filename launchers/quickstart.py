"""Makes everything the quick start trains on: tokenizer, untrained model, tasks, demonstrations.

All of it is generated on the spot from a seed; nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from envs.quickstart import (
    HABITS,
    KINDS,
    Demonstration,
    copy_exercise,
    demonstration,
    make_world,
    vocabulary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TAGS = ("think", "search", "python", "result", "answer")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Lower-case words and signs absorb the spaces around them, so that a name is the same token
# wherever it stands; digits go in pairs. Both shorten the traces and make copying easy to learn.
PIECE = r"\\boxed\{| ?[a-z]+ ?| ?[A-Z][a-z]+|[0-9]{1,2}| [*+-] "
# The cold start has three stages: copying, clean demonstrations, demonstrations with habits.
COPIES = 2000  # exercises
CLEAN = 2500  # demonstrations of each kind, as the two below
MIXED = 1000
GATE = 32  # never trained on; they measure the skill of each kind


TOLD = """\
Made on the spot: an untrained model of half a million parameters, a knowledge base of invented
companies, and questions that need search, Python, or both; held-out ones are about others.
The cold start imitates demonstrations. The last of them are poor on purpose: in most the agent
gives up at once or after its first tool result. So it can do the task and mostly does not.
Reinforcement learning then sees only the reward of its own attempts; what it adds is the habit of
going through with the tools."""


def prepare(run: Path, seed: int) -> str:
    """Everything below the directory of a run: data/ and model/. Returns what the user is told."""
    write_data(run / "data", seed)
    build_model(run / "model", seed)
    return TOLD


def write_data(directory: str | Path, seed: int) -> None:
    """Writes kb, train, dev, heldout, sft and gate as JSONL files.

    A row of sft has the stage it belongs to: "copy", "clean", or "mixed", where a part is poor on
    purpose. gate holds clean demonstrations about facts of their own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    world = make_world(seed)
    _write(directory / "kb.jsonl", world.documents())
    for name, questions in world.questions.items():
        _write(directory / f"{name}.jsonl", (question.row() for question in questions))
    reserved = set(world.reserved())
    rng = Random(f"gate {seed}")
    gate = [demonstration(rng, kind, reserved, "clean") for kind in KINDS for _ in range(GATE)]
    for demo in gate:
        reserved |= {demo.question.question, *(fact.text for fact in demo.question.facts)}
    _write(directory / "gate.jsonl", (_demonstration_row(demo, "gate") for demo in gate))
    _write(directory / "sft.jsonl", _sft_rows(Random(f"sft {seed}"), reserved))


def _sft_rows(rng: Random, reserved: Collection[str]) -> Iterator[dict[str, Any]]:
    for _ in range(COPIES):
        text = copy_exercise(rng)
        turns = [{"action": text, "result": None}]
        yield {"stage": "copy", "kind": "copy", "habit": "clean", "question": text, "turns": turns}
    for stage, count, habit in (("clean", CLEAN, "clean"), ("mixed", MIXED, None)):
        for _ in range(count):
            for kind in KINDS:
                yield _demonstration_row(demonstration(rng, kind, reserved, habit), stage)


def _demonstration_row(demo: Demonstration, stage: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "kind": demo.question.kind,
        "habit": demo.habit,
        "question": demo.question.question,
        "turns": [{"action": turn.action, "result": turn.result} for turn in demo.turns],
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level where the world has words, bytes for the rest: any text survives a round trip.

    The tags are ordinary tokens (they stay in decoded text), the chat markers special ones.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
        "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in _pieces()
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECE), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (PAD, START, END)])
    tags = [text for tag in TAGS for text in (f"<{tag}>", f"</{tag}>")]
    backend.add_tokens([AddedToken(text, normalized=False) for text in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _pieces() -> Iterator[str]:
    """The words of the world, which are found by writing a few hundred demonstrations."""
    yield from vocabulary()
    yield from (f"{number:02d}" for number in range(100))
    rng = Random("vocabulary")
    words = {"user", "assistant"}
    for kind in KINDS:
        for habit in HABITS:
            for _ in range(30):
                demo = demonstration(rng, kind, (), habit)
                texts = [demo.question.question]
                texts += [text for turn in demo.turns for text in (turn.action, turn.result or "")]
                for text in texts:
                    words.update(re.findall(PIECE, text))
    yield from sorted(words)


def build_model(path: str | Path, seed: int) -> None:
    """Writes an untrained Qwen3 of about half a million parameters as a Hugging Face directory.

    Head size 64 is one that every serving engine has kernels for. The output head is a tensor of
    its own (tied weights are not reloaded correctly by vLLM on CPU), but starts equal to the
    embedding: copying a token then works before its output row has been trained.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    ids: Mapping[str, int] = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
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


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
