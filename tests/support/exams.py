"""Invented questions in the schemas of GAIA and HLE, a policy that answers them, and a judge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.support import tea_house
from tests.support.json_files import write_rows


class Item(NamedTuple):
    """A question, its group, the gold, the answer of the policy, and the judge's verdict."""

    question: str
    group: Any
    gold: str
    answer: str
    judged: str


GAIA = [
    Item("Which city is built on seven hills?", 1, "Rome", "Rome", "CORRECT"),
    Item("Which city has Central Park?", 1, "New York City", "the Big Apple", "CORRECT"),
    Item("How many hearts has an octopus?", 2, "3", "3", "INCORRECT"),
    Item("How many moons has Mars?", 2, "2", "9", "INCORRECT"),
    Item("Which metal is liquid?", 3, "mercury", "I will not say", "I cannot judge that."),
]
HLE = [
    Item("Which group is simple?", ("multipleChoice", "Math"), "C", "C", "CORRECT"),
    Item("Which graph is planar?", ("multipleChoice", "Math"), "B", "D", "INCORRECT"),
    Item("What is 3 * 7?", ("exactMatch", "Math"), "21", "21.0", "CORRECT"),
    Item("Which bone is the longest?", ("exactMatch", "Biology"), "femur", "skull", "INCORRECT"),
]
BY_QUESTION = {item.question: item for item in (*GAIA, *HLE)}


def write_exams(folder: Path) -> tuple[Path, Path]:
    """metadata.jsonl of GAIA and rows of HLE; the last of each is about a file or an image."""
    gaia: list[dict[str, Any]] = []
    for n, item in enumerate(GAIA):
        row = {"task_id": f"g{n}", "Level": item.group, "Annotator Metadata": {"Steps": "none"}}
        gaia.append(row | {"Question": item.question, "Final answer": item.gold, "file_name": ""})
    hle: list[dict[str, Any]] = []
    for n, item in enumerate(HLE):
        kind, category = item.group
        row = {"id": f"h{n}", "image": "", "raw_subject": "any", "canary": "BENCHMARK DATA"}
        row |= {"question": item.question, "answer": item.gold}
        hle.append(row | {"answer_type": kind, "category": category})
    gaia.append({**gaia[-1], "task_id": "g-file", "file_name": "table.xlsx"})
    hle.append({**hle[-1], "id": "h-image", "image": "data:image/png;base64,AAAA"})
    for name, rows in (("gaia", gaia), ("hle", hle)):
        write_rows(folder / f"{name}.jsonl", rows)
    return folder / "gaia.jsonl", folder / "hle.jsonl"


def turn(prompt: str, rng: Random) -> str:
    """Answers known questions at once, and plays the world of the tea houses otherwise."""
    for question, item in BY_QUESTION.items():
        if question in prompt:
            return f"<think>I know.</think><answer>\\boxed{{{item.answer}}}</answer>"
    return tea_house.turn(prompt, rng)


def judged(messages: list[dict[str, str]]) -> str:
    """The verdict about the question in the judge's prompt; unknown questions are right."""
    found = re.search(r"Question: (\".*\")", messages[1]["content"])
    assert found is not None
    item = BY_QUESTION.get(json.loads(found[1]))
    return "CORRECT" if item is None else item.judged
