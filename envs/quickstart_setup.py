"""Makes everything the quick start trains on: tokenizer, untrained model, tasks, demonstrations.

All of it is generated on the spot from a seed; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.cold_start import tiny_model, tiny_tokenizer
from agentenv.disk import write_whole
from agentenv.envs.quickstart import (
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

TOOLS = ("search", "python")
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
    """Everything below the directory of a run: data/ and model/. Returns the text for the user."""
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
    """The tokenizer of the world's words."""
    return tiny_tokenizer(_texts(), tools=TOOLS, words=vocabulary())


def build_model(path: str | Path, seed: int) -> None:
    """Writes an untrained model of about half a million parameters that knows the world's words."""
    tiny_model(path, _texts(), seed, tools=TOOLS, words=vocabulary())


def _texts() -> Iterator[str]:
    """A few hundred demonstrations, in which each word of the world is found."""
    rng = Random("vocabulary")
    for kind in KINDS:
        for habit in HABITS:
            for _ in range(30):
                demo = demonstration(rng, kind, (), habit)
                yield demo.question.question
                yield from (
                    text for turn in demo.turns for text in (turn.action, turn.result or "")
                )


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_whole(path, (f"{json.dumps(row)}\n".encode() for row in rows))
