"""The quick start's demonstrations as files of dialogues and of preferences.

{run}/data/sharegpt.jsonl  sharegpt-heldout.jsonl    whole chains with <result>, as published
{run}/data/pairs.jsonl     pairs-heldout.jsonl       the tools' answer against giving up
{run}/data/dataset_info.json                         LLaMA-Factory's registry of the four
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from agentenv.envs.quickstart import HABITS, KINDS, demonstration, make_world
from agentenv.envs.quickstart_setup import build_model, write_data

DIALOGUES = 600  # of each kind
PAIRS = 150
HELD_OUT = 16
POOR = tuple(habit for habit in HABITS if habit in ("refuse", "quit"))


def prepare(run: Path, seed: int) -> str:
    """Model, data and dialogues below the directory of a run. Returns the text for the user."""
    write_data(run / "data", seed)
    write_dialogues(run / "data", seed)
    build_model(run / "model", seed)
    return (
        "Made on the spot: an untrained model of half a million parameters, dialogues that search "
        "and calculate, and preferences for them over giving up."
    )


def write_dialogues(folder: Path, seed: int) -> None:
    """Writes the files named above; held-out rows are about questions of their own."""
    reserved = set(make_world(seed).reserved())
    registry = {}
    for name, rows, ranking in (
        ("sharegpt", _dialogues, False),
        ("pairs", _pairs, True),
    ):
        held = list(rows(Random(f"{name} held out {seed}"), HELD_OUT, reserved))
        asked = {row["conversations"][0]["value"] for row in held}
        count = PAIRS if ranking else DIALOGUES
        learned = list(rows(Random(f"{name} {seed}"), count, reserved | asked))
        for suffix, part in (("", learned), ("-heldout", held)):
            file = f"{name}{suffix}.jsonl"
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / file).write_text(text, encoding="utf-8")
            columns = {"messages": "conversations"}
            if ranking:
                columns |= {"chosen": "chosen", "rejected": "rejected"}
            registry[f"{name}{suffix}"] = {
                "file_name": file,
                "formatting": "sharegpt",
                "columns": columns,
                "ranking": ranking,
            }
    (folder / "dataset_info.json").write_text(json.dumps(registry, indent=2), encoding="utf-8")


def _dialogues(rng: Random, count: int, reserved: set[str]) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        for kind in KINDS:
            demo = demonstration(rng, kind, reserved, "clean")
            yield {
                "conversations": [
                    {"from": "human", "value": demo.question.question},
                    {"from": "gpt", "value": _chain(demo.turns)},
                ]
            }


def _pairs(rng: Random, count: int, reserved: set[str]) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        for kind in KINDS:
            state = rng.getstate()
            good = demonstration(rng, kind, reserved, "clean")
            rng.setstate(state)
            bad = demonstration(rng, kind, reserved, _poor_habit(good.question.question))
            yield {
                "conversations": [{"from": "human", "value": good.question.question}],
                "chosen": {"from": "gpt", "value": _chain(good.turns)},
                "rejected": {"from": "gpt", "value": _chain(bad.turns)},
            }


def _poor_habit(question: str) -> str:
    """A poor habit, the same for the same question."""
    return Random(question).choice(POOR)


def _chain(turns: Any) -> str:
    """A whole answer as the published files hold it: results between the texts of the policy."""
    parts = []
    for turn in turns:
        parts.append(turn.action)
        if turn.result is not None:
            parts.append(f" <result>\n{turn.result}\n</result>")
    return "".join(parts)
