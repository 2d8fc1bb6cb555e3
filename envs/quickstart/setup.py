"""Creates the inputs of the quick start: tokenizer, untrained model, tasks, demonstrations.

Everything is generated from a seed; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentenv.adapters.cold_start import tiny_model, tiny_tokenizer, write_rows
from agentenv.envs.quickstart import world

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


TOOLS = ("search", "python")
# The cold start has three stages: copying, clean demonstrations, demonstrations with habits.
COPIES = 2000  # exercises
CLEAN = 2500  # demonstrations of each kind, as the two below
MIXED = 1000
GATE = 32  # demonstrations of each kind that are not trained on; they measure the skill


INTRODUCTION = """\
Created at the start: a randomly initialized model of half a million parameters, a knowledge base
of invented companies, and questions that need search, Python, or both. The cold start imitates
demonstrations. The last ones are poor on purpose: in most the agent gives up at once or after its
first tool result, so that the policy can do the task but rarely does. Reinforcement learning sees
only the reward of the policy's own attempts and teaches it to finish."""


def prepare(run: Path, seed: int) -> str:
    """Write data/ and model/ in a run's directory. Returns a text for the user."""
    write_data(run / "data", seed)
    build_model(run / "model", seed)
    return INTRODUCTION


def write_data(directory: str | Path, seed: int) -> None:
    """Write kb, train, dev, heldout, sft and gate as JSONL files.

    A row of sft has its stage: "copy", "clean", or "mixed", which includes poor ones on purpose.
    gate has clean demonstrations about separate facts.
    """
    directory = Path(directory)
    made = world.make_world(seed)
    write_rows(directory / "kb.jsonl", made.documents())
    for name, questions in made.questions.items():
        write_rows(directory / f"{name}.jsonl", (question.row() for question in questions))
    reserved = set(made.reserved())
    rng = Random(f"gate {seed}")
    gate = [
        world.demonstration(rng, kind, reserved, "clean")
        for kind in world.KINDS
        for _ in range(GATE)
    ]
    for demo in gate:
        reserved |= {demo.question.question, *(fact.text for fact in demo.question.facts)}
    write_rows(directory / "gate.jsonl", (_demonstration_row(demo, "gate") for demo in gate))
    write_rows(directory / "sft.jsonl", _sft_rows(Random(f"sft {seed}"), reserved))


def _sft_rows(rng: Random, reserved: Collection[str]) -> Iterator[dict[str, Any]]:
    for _ in range(COPIES):
        text = world.copy_exercise(rng)
        turns = [{"action": text, "result": None}]
        yield {"stage": "copy", "kind": "copy", "habit": "clean", "question": text, "turns": turns}
    for stage, count, habit in (("clean", CLEAN, "clean"), ("mixed", MIXED, None)):
        for _ in range(count):
            for kind in world.KINDS:
                yield _demonstration_row(world.demonstration(rng, kind, reserved, habit), stage)


def _demonstration_row(demo: world.Demonstration, stage: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "kind": demo.question.kind,
        "habit": demo.habit,
        "question": demo.question.question,
        "turns": [{"action": turn.action, "result": turn.result} for turn in demo.turns],
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the world's words."""
    return tiny_tokenizer(_texts(), tools=TOOLS, words=world.vocabulary())


def build_model(path: str | Path, seed: int) -> None:
    """Write an untrained model of about half a million parameters with the world's vocabulary."""
    tiny_model(path, _texts(), seed, tools=TOOLS, words=world.vocabulary())


def _texts() -> Iterator[str]:
    """A few hundred demonstrations, which contain every word of the world."""
    rng = Random("vocabulary")
    for kind in world.KINDS:
        for habit in world.HABITS:
            for _ in range(30):
                demo = world.demonstration(rng, kind, (), habit)
                yield demo.question.question
                yield from (
                    text for turn in demo.turns for text in (turn.action, turn.result or "")
                )


# Demonstrations as files of dialogues and of preferences:
#
#     {run}/data/sharegpt.jsonl  sharegpt-heldout.jsonl    whole chains with <result>, as published
#     {run}/data/pairs.jsonl     pairs-heldout.jsonl       answers with tools versus giving up
#     {run}/data/dataset_info.json                         LLaMA-Factory's registry of the four

DIALOGUES = 600  # of each kind
PAIRS = 150
HELD_OUT = 16
POOR = tuple(habit for habit in world.HABITS if habit in ("refuse", "quit"))


def prepare_chat(run: Path, seed: int) -> str:
    """Write model, data and dialogues in a run's directory. Returns a text for the user."""
    write_data(run / "data", seed)
    write_dialogues(run / "data", seed)
    build_model(run / "model", seed)
    return (
        "Created at the start: a randomly initialized model of half a million parameters, "
        "dialogues that search and calculate, and preferences for them over giving up."
    )


def write_dialogues(folder: Path, seed: int) -> None:
    """Write the files named above; held-out rows have separate questions."""
    reserved = set(world.make_world(seed).reserved())
    registry = {}
    for name, count in (("sharegpt", DIALOGUES), ("pairs", PAIRS)):
        ranked = name == "pairs"
        held = list(_rows(Random(f"{name} held out {seed}"), HELD_OUT, reserved, ranked))
        held_out = {row["conversations"][0]["value"] for row in held}
        learned = _rows(Random(f"{name} {seed}"), count, reserved | held_out, ranked)
        columns = {"chosen": "chosen", "rejected": "rejected"} if ranked else {}
        for suffix, part in (("", learned), ("-heldout", held)):
            file = f"{name}{suffix}.jsonl"
            write_rows(folder / file, part)
            registry[f"{name}{suffix}"] = {
                "file_name": file,
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", **columns},
                "ranking": ranked,
            }
    (folder / "dataset_info.json").write_text(json.dumps(registry, indent=2), encoding="utf-8")


def _rows(rng: Random, count: int, reserved: set[str], ranked: bool) -> Iterator[dict[str, Any]]:
    """Dialogues, or questions with a good and a poor one."""
    for _ in range(count):
        for kind in world.KINDS:
            state = rng.getstate()
            good = world.demonstration(rng, kind, reserved, "clean")
            human = {"from": "human", "value": good.question.question}
            answer = {"from": "gpt", "value": chain(good.turns)}
            if not ranked:
                yield {"conversations": [human, answer]}
                continue
            rng.setstate(state)
            habit = Random(good.question.question).choice(POOR)  # always that of the question
            bad = world.demonstration(rng, kind, reserved, habit)
            rejected = {"from": "gpt", "value": chain(bad.turns)}
            yield {"conversations": [human], "chosen": answer, "rejected": rejected}


def chain(turns: Any) -> str:
    """A whole answer in the form of the published files: results between the policy's texts."""
    parts = []
    for turn in turns:
        parts.append(turn.action)
        if turn.result is not None:
            parts.append(f" <result>\n{turn.result}\n</result>")
    return "".join(parts)
