"""Questions, demonstrations and a small model for the agents in this folder, all from a seed."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, make, texts_of, tiny_model, write_rows

ITEMS = ["Zorvex", "Veltron", "Quandex", "Trilab", "Nexor", "Balmat", "Dynix", "Fexpath"]
PRICES = [52, 57, 62, 67, 72, 77, 82, 87]


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: question, answer, and the tables in the agent's files."""
    prices = dict(zip(ITEMS, rng.choices(PRICES, k=8), strict=True))
    partners = dict(zip(ITEMS, rng.sample(ITEMS, 8), strict=True))
    item = rng.choice(ITEMS)
    goods = f"one {item}" if kind == "price" else f"the partner of {item}"
    answer = prices[item if kind == "price" else partners[item]]
    row = {"question": f"What does {goods} cost?", "answer": answer, "kind": kind, "item": item}
    return row | {name: table(rows) for name, rows in (("prices", prices), ("partners", partners))}


def table(rows: dict[str, Any]) -> str:
    return "".join(f"{name} {value}\n" for name, value in rows.items())


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    return [question(rng, kind) for _ in range(number // 2) for kind in ("price", "partner")]


def teacher(look_up: str) -> Callable[[Task, Sequence[str]], str]:
    """A skilled policy: a function from the question and all results so far to the next turn."""

    def turn(task: Task, results: Sequence[str]) -> str:
        last = results[-1].split()[-1] if results else task.metadata["item"]
        if last.isdigit():
            return f"<think>I know it.</think><answer>{last}</answer>"
        file = "partner" if task.kind == "partner" and not results else "price"
        return "<think>I look it up.</think>" + look_up.format(file=file, item=last)

    return turn


def lazy(task: Task, results: Sequence[str]) -> str:
    return "<think>I do not know.</think><answer>unknown</answer>"


def prepare(run: Path, seed: int, config: str, look_up: str, tools: list[str]) -> str:
    """Write the files that the configuration names as {run}/... The agent itself plays all
    demonstrations, so that they have the same tokens as training."""
    tables = tomllib.loads(Path(config).read_text())
    env, grader = tables["env"], tables["grader"]

    def agent(task: Task) -> Any:
        return make(env["id"], task, grader=grader, program=env["kwargs"]["program"])

    rng, data = Random(seed), run / "data"
    write_rows(data / "train.jsonl", questions(rng, 400))
    write_rows(data / "heldout.jsonl", questions(rng, 30))
    good = demonstrate(agent, questions(rng, 120), teacher(look_up), stage="clean")
    poor = demonstrate(agent, questions(rng, 30), lazy, stage="mixed")
    again = [{**row, "stage": "mixed"} for row in good[:30]]
    write_rows(data / "sft.jsonl", [*good, *poor, *again])
    write_rows(data / "gate.jsonl", demonstrate(agent, questions(rng, 16), teacher(look_up)))
    tiny_model(run / "model", texts_of([*good, *poor]), seed, tools=tools)
    return f"{len(good)} demonstrations, {sum(row['success'] for row in good)} of them correct."


def langgraph(run: Path, seed: int) -> str:
    tools = ["price", "partner"]
    return prepare(run, seed, "langgraph.toml", "<{file}>{item}</{file}>", tools)


def shell(run: Path, seed: int) -> str:
    return prepare(run, seed, "shell.toml", "<shell>grep ^{item} {file}s.txt</shell>", ["shell"])
