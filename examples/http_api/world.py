"""Questions, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from examples.http_api.env import PricesEnv
from examples.http_api.server import ITEMS, price_of

KINDS = ("price", "total")


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: a question, and its store, item and count."""
    store, item, count = rng.randint(10, 99), rng.choice(ITEMS), rng.randint(10, 98)
    text = {
        "price": f"What does one {item} cost in store {store} ?",
        "total": f"What do {count} {item} cost in store {store} ?",
    }[kind]
    answer = price_of(store, item) * (count if kind == "total" else 1)
    row = {"question": text, "answer": answer, "kind": kind}
    return {**row, "store": store, "item": item, "count": count}


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy, which uses the API."""
    if results:
        return f"<think>I know it.</think><answer>{results[-1]}</answer>"
    row = task.metadata
    call = f'"store": {row["store"]}, "item": "{row["item"]}"'
    if task.kind == "price":
        return f"<think>I ask.</think><price>{{{call}}}</price>"
    return f'<think>I ask.</think><total>{{{call}, "count": {row["count"]}}}</total>'


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    rng = Random(f"prices {seed}")
    data = run / "data"
    for name, number in (("train", 400), ("heldout", 100)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(PricesEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(PricesEnv, questions(rng, 250), give_up, stage="mixed")
    skilled = demonstrate(PricesEnv, questions(rng, 100), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(PricesEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("price", "total"))
    return "Created questions about prices, demonstrations (skilled and giving up) and a model."
