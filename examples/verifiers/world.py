"""Demonstrations and a model for the parcels; the package generates the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Message, Task, demonstrate, texts_of, tiny_model, write_rows
from agentenv.envs.dialogue import DialogueEnv
from agentenv.envs.qa_grader import ExactMatch

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
PLACES = NAMES.split()  # as in the package, which can be imported only next to verifiers


def tracker(task: Task, dialogue: Sequence[Message]) -> str:
    """The answer of the package's tracker to the agent's last message."""
    known = [one for one in task.metadata["parcels"] if one in dialogue[-1].content]
    return f"It is in {task.metadata['parcels'][known[0]] if known else 'no place that I know of'}."


class TwinEnv(DialogueEnv):
    """An in-process equivalent of the package, which plays the demonstrations."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[], grader=ExactMatch(), user=tracker)


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """Rows that differ from the package's."""
    found = []
    for _ in range(number):
        parcels = {str(one): rng.choice(PLACES) for one in rng.sample(range(1000, 10_000), 6)}
        parcel = rng.choice(list(parcels))
        question = f"Where is my parcel {parcel}?"
        row = {"question": question, "answer": parcels[parcel]}
        found.append({**row, "parcel": parcel, "parcels": parcels})
    return found


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy."""
    if results:
        return f"<think>I know it.</think><answer>{results[-1].split()[-1][:-1]}</answer>"
    return f"<think>I look it up.</think>Track {task.metadata['parcel']}"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write demonstrations and model into the folder of the run."""
    rng = Random(f"parcels {seed}")
    clean = demonstrate(TwinEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(TwinEnv, questions(rng, 250), give_up, stage="mixed")
    skilled = demonstrate(TwinEnv, questions(rng, 100), solve, stage="mixed")
    write_rows(run / "data" / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(run / "data" / "gate.jsonl", demonstrate(TwinEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed)
    return "Created demonstrations (skilled and giving up) and a model."
