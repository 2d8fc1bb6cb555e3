"""Calculations, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from examples.mcp_maths.env import MathsEnv

KINDS = ("product", "both")


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: a calculation."""
    a, b, c = rng.randint(52, 99), rng.randint(52, 99), rng.randint(10, 98)
    row = {"kind": kind, "numbers": [a, b, c]}
    if kind == "product":
        return {"question": f"What is {a} * {b}?", "answer": a * b, **row}
    return {"question": f"What is {a} * {b} + {c}?", "answer": a * b + c, **row}


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy, which uses the server."""
    a, b, c = task.metadata["numbers"]
    if not results:
        return f'<think>I multiply.</think><multiply>{{"a": {a}, "b": {b}}}</multiply>'
    if task.kind == "both" and len(results) == 1:
        return f'<think>I add.</think><add>{{"a": {results[0]}, "b": {c}}}</add>'
    return f"<think>I know it.</think><answer>{results[-1]}</answer>"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    rng = Random(f"maths {seed}")
    data = run / "data"
    for name, number in (("train", 400), ("heldout", 100)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(MathsEnv, questions(rng, 300), solve, stage="clean")
    lazy = demonstrate(MathsEnv, questions(rng, 125), give_up, stage="mixed")
    skilled = demonstrate(MathsEnv, questions(rng, 50), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(MathsEnv, questions(rng, 16), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("add", "multiply"))
    return "Created calculations, demonstrations (skilled and giving up) and a model."
