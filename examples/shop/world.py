"""Customers, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from examples.shop.env import ShopEnv

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
ITEMS = NAMES.split()
KINDS = ("price", "some", "every")


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: a customer's request, and the shop."""
    items = {item: [rng.randint(52, 99), rng.randint(52, 99)] for item in rng.sample(ITEMS, 6)}
    item = rng.choice(list(items))
    price, left = items[item]
    count = {"price": 1, "some": rng.randint(20, left), "every": left}[kind]
    text = {
        "price": f"What does one {item} cost?",
        "some": f"Order {count} {item}. What do they cost?",
        "every": f"Order every {item} that is left. What do they cost?",
    }[kind]
    row = {"question": text, "answer": price * count, "kind": kind}
    return {**row, "items": items, "item": item, "count": count}


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy."""
    item = task.metadata["item"]
    if task.kind != "some" and not results:
        return f"<think>I look it up.</think><find>{item}</find>"
    if task.kind == "price":
        return f"<think>I know it.</think><answer>{results[0].partition(' ')[0]}</answer>"
    if not results or results[-1].endswith(" left"):
        count = results[-1].split()[-2] if results else task.metadata["count"]
        call = f'{{"item": "{item}", "count": {count}}}'
        return f"<think>I order it.</think><order>{call}</order>"
    return f"<think>I know it.</think><answer>{results[-1].rpartition(' ')[2]}</answer>"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    rng = Random(f"shop {seed}")
    data = run / "data"
    for name, number in (("train", 300), ("heldout", 100)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(ShopEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(ShopEnv, questions(rng, 250), give_up, stage="mixed")
    skilled = demonstrate(ShopEnv, questions(rng, 100), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(ShopEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("find", "order"))
    return "Created a shop, its customers, demonstrations (skilled and giving up) and a model."
