"""Customers, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from examples.customer.env import CustomerEnv

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
PLACES = NAMES.split()
KINDS = ("named", "asked", "twice")


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: a customer, and the orders of the shop."""
    numbers = rng.sample(range(1000, 10_000), 6)
    orders = {str(number): rng.choice(PLACES) for number in numbers}
    number = rng.choice(list(orders))
    text = f"Where is my order {number}?" if kind == "named" else "Where is my order?"
    return {"question": text, "answer": orders[number], "kind": kind,
            "orders": orders, "number": number}  # fmt: skip


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy, which asks until it knows the number."""
    number = task.metadata["number"]
    if results and results[-1].startswith("It is in"):
        return f"<think>I know it.</think><answer>{results[-1].split()[-1][:-1]}</answer>"
    if task.kind == "named" or (results and number in results[-1]):
        return f"<think>I look it up.</think><track>{number}</track>"
    return "<think>I ask for it.</think>What is your order number?"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    rng = Random(f"customer {seed}")
    data = run / "data"
    for name, number in (("train", 300), ("heldout", 100)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(CustomerEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(CustomerEnv, questions(rng, 250), give_up, stage="mixed")
    skilled = demonstrate(CustomerEnv, questions(rng, 100), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(CustomerEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=["track"])
    return "Created customers, demonstrations (skilled and giving up) and a model."
