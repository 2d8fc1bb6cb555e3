"""GSM8K's questions, and its worked solutions as demonstrations with a Python tool.

A solution marks its calculations: "Natalia sold 48/2 = <<48/2=24>>24 clips in May." Each one
becomes a tool call after the preceding text, and the environment answers the call.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, write_rows
from agentenv.envs.code_interpreter import CodeInterpreterEnv

QUESTIONS = Path(__file__).parent / "questions.jsonl.xz"
NUM_DEV = 500  # training questions held out for the choice of learning rates
NUM_GATE = 64  # number of these whose demonstrations measure the cold start
MAX_CALLS = 7

CALCULATION = re.compile(r"<<([^=<>]+)=[^<>]*>>")
EXPRESSION = re.compile(r"[0-9+\-*/(). ]+")
NUMBER = re.compile(r"-?[0-9.]+")


def questions(name: str) -> list[dict[str, Any]]:
    """The rows of the set "train" or "test", in their published order: question, answer (only the
    number) and worked solution."""
    with lzma.open(QUESTIONS, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [_row(row["question"], row["answer"]) for row in rows if row["set"] == name]


def _row(question: str, solution: str) -> dict[str, Any]:
    answer = solution.partition("####")[2].strip().replace(",", "")
    return {"question": question, "answer": answer, "kind": "gsm8k", "solution": solution}


def calculations(solution: str) -> list[tuple[str, str]]:
    """(thought, expression) of each calculation in a worked solution."""
    found = []
    for line in solution.partition("####")[0].strip().splitlines():
        end = 0
        for match in CALCULATION.finditer(line):
            thought = re.sub(r"[=\s$€£]+$", "", line[end : match.start()])
            end = match.end()
            found.append((thought.strip(), match[1].strip()))
    return found


def is_convertible(row: dict[str, Any]) -> bool:
    """Whether each calculation is a Python expression and the answer is a number."""
    expressions = [expression for _, expression in calculations(row["solution"])]
    fits = 1 <= len(expressions) <= MAX_CALLS and NUMBER.fullmatch(row["answer"])
    return bool(fits) and all(map(EXPRESSION.fullmatch, expressions))


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn: the next calculation, then the answer."""
    planned = calculations(task.metadata["solution"])
    if len(results) < len(planned):
        thought, expression = planned[len(results)]
        return f"<think>{thought}</think><python>print({expression})</python>"
    return f"<think>That is the answer.</think><answer>\\boxed{{{task.answers[0]}}}</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write train, dev, test, sft and gate as JSONL files to data/ in the folder of the run."""
    train, data = questions("train"), run / "data"
    Random(f"gsm8k {seed}").shuffle(train)
    dev, train = train[:NUM_DEV], train[NUM_DEV:]
    for name, rows in (("dev", dev), ("train", train), ("test", questions("test"))):
        write_rows(data / f"{name}.jsonl", rows)
    for name, rows in (("gate", dev), ("sft", train)):
        shown = [row for row in rows if is_convertible(row)]
        shown = shown[:NUM_GATE] if name == "gate" else shown
        played = demonstrate(CodeInterpreterEnv, shown, solve, stage="cold start")
        write_rows(data / f"{name}.jsonl", [row for row in played if row["success"]])
    return f"GSM8K with a Python tool: {len(train):,} training questions, {NUM_DEV} others held out"
