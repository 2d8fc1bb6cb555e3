"""Questions, demonstrations and the model, all generated from a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, ToolEnv, ToolError, demonstrate, texts_of, tiny_model, tool, write_rows
from agentenv.base.errors import ConfigError
from agentenv.envs.grading.reward import make_grader

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
ITEMS = NAMES.split()
KINDS = ("price", "partner")


class TwinEnv(ToolEnv):
    """An in-process equivalent of the agent, which plays the demonstrations."""

    def __init__(self, task: Task, grader: Mapping[str, Any] | None = None) -> None:
        prices = json.loads(task.metadata["prices"])
        partners = json.loads(task.metadata["partners"])

        def known(table: dict[str, Any], item: str) -> str:
            if item not in table:
                raise ToolError("There is no such item.")
            return str(table[item])

        @tool
        def price(item: str) -> str:
            """The price of an item."""
            return known(prices, item)

        @tool
        def partner(item: str) -> str:
            """What goes with an item."""
            return known(partners, item)

        graded = make_grader(grader, kind="exact", partial_credit=True)  # as a program has it
        super().__init__(task, tools=[price, partner], grader=graded)


def question(rng: Random, kind: str) -> dict[str, Any]:
    """A row: the question, and the tables in the agent's files."""
    prices = {item: rng.randint(52, 99) for item in ITEMS}
    partners = dict(zip(ITEMS, rng.sample(ITEMS, len(ITEMS)), strict=True))
    item = rng.choice(ITEMS)
    text = f"What does one {item} cost?"
    if kind == "partner":
        text = f"What does the partner of {item} cost?"
    priced = item if kind == "price" else partners[item]
    row = {"question": text, "answer": prices[priced], "kind": kind, "item": item}
    return {**row, "prices": json.dumps(prices), "partners": json.dumps(partners)}


def questions(rng: Random, number: int) -> list[dict[str, Any]]:
    """`number` rows of each kind, shuffled."""
    rows = [question(rng, kind) for kind in KINDS for _ in range(number)]
    rng.shuffle(rows)
    return rows


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy."""
    if results and results[-1].isdigit():
        return f"<think>I know it.</think><answer>{results[-1]}</answer>"
    if task.kind == "partner" and not results:
        return f"<think>I look for it.</think><partner>{task.metadata['item']}</partner>"
    item = results[-1] if results else task.metadata["item"]
    return f"<think>I look it up.</think><price>{item}</price>"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>unknown</answer>"


def compile_client() -> None:
    """Import the agent's modules once, to compile them: a sandboxed program cannot."""
    try:
        from openai import OpenAI
    except ImportError as error:
        raise ConfigError("the agent requires OpenAI's client: pip install openai") from error
    _ = OpenAI(api_key="none").chat.completions


def prepare(run: Path, seed: int) -> str:
    """Write questions, demonstrations and model into the folder of the run."""
    compile_client()
    rng = Random(f"agent {seed}")
    data = run / "data"
    for name, number in (("train", 300), ("heldout", 15)):
        write_rows(data / f"{name}.jsonl", questions(rng, number))
    clean = demonstrate(TwinEnv, questions(rng, 1000), solve, stage="clean")
    lazy = demonstrate(TwinEnv, questions(rng, 150), give_up, stage="mixed")
    skilled = demonstrate(TwinEnv, questions(rng, 150), solve, stage="mixed")
    write_rows(data / "sft.jsonl", [*clean, *lazy, *skilled])
    write_rows(data / "gate.jsonl", demonstrate(TwinEnv, questions(rng, 32), solve))
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("price", "partner"))
    return "Created prices, demonstrations (skilled and giving up) and a model."
