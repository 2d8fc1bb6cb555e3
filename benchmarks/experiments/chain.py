"""A longer task for `algorithms.py --task chain`: questions that need two or three calls.

    What is the home of the price of the founder of Kaldan Arbow?

Every link is a look-up whose result says what to look up next. One look-up in 16 finds two
values, of which one is right, so that there the policy can only guess: uncertainty that a result
has caused and that another result has not, which the quick start does not have. Facts are
invented, and so are their relations: they are named by words that the tokenizer of the quick
start has. Training and held-out questions begin at different people. As in the quick start, the
cold start imitates demonstrations most of which are poor on purpose: they give up at once or
after any link, or follow a wrong one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from agentenv.env import register
from agentenv.envs.grading.reward import ToolReward
from agentenv.envs.quickstart import PEOPLE, copy_exercise
from agentenv.envs.quickstart_setup import COPIES, GATE, build_model
from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool
from agentenv.types import Task, ToolResult

RELATIONS = ("founder", "price", "birthplace", "home", "birthyear")
LENGTHS = (2, 3)
HABITS = {"clean": 0.1, "refuse": 0.3, "quit": 0.5, "slip": 0.1}
QUESTIONS = {"train": 360, "heldout": 160}  # of each length
CLEAN, MIXED = 2500, 1000  # demonstrations of each length
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 256, "max_turns": 6}
AMBIGUOUS = 1 / 16  # share of the look-ups that find two values
Link = tuple[str, str, str, str]  # relation, person, value, and what a look-up says

register("bench/Chain-v0", "benchmarks.experiments.chain:ChainEnv")


class LookUp(StatelessTool):
    """The value of a fact, as "founder of Kaldan Arbow" names it."""

    name = "search"
    description = "Look a fact up."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self, facts: dict[str, str], delay_s: float) -> None:
        self.facts = facts
        self.delay_s = delay_s

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        await asyncio.sleep(self.delay_s)
        query = str(arguments["query"]).strip()
        return ToolResult(self.facts.get(query, "No results."))


@cache
def read_json(path: str) -> dict[str, Any]:
    """Read once in a process."""
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


class ChainEnv(ToolEnv):
    """Follow a chain of facts. `corpus` is a JSON object from query to result."""

    def __init__(self, task: Task, corpus: str, delay_s: float = 0.0) -> None:
        tools = [LookUp(read_json(corpus), delay_s)]
        super().__init__(task, tools=tools, grader=ToolReward())


def configure(raw: dict[str, Any]) -> dict[str, Any]:
    """The quick start's configuration with this task in place of its own."""
    kwargs = {"corpus": "{run}/data/facts.json"}
    return raw | {
        "run": {"setup": "benchmarks.experiments.chain:prepare"},
        "env": {"id": "bench/Chain-v0", "module": "benchmarks.experiments.chain", "kwargs": kwargs},
        "limits": raw["limits"] | LIMITS | {"max_tool_calls": max(LENGTHS) + 1},
    }


def prepare(run: Path, seed: int) -> str:
    """Data and an untrained model, as `agentenv.envs.quickstart_setup.prepare`."""
    rng = Random(f"chain {seed}")
    data = run / "data"
    data.mkdir(parents=True, exist_ok=True)
    links = {(name, one): link(rng, name, one) for name in RELATIONS for one in PEOPLE}
    facts = {f"{relation} of {one}": said for relation, one, _, said in links.values()}
    (data / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def look(relation: str, person: str) -> Link:
        return links[relation, person]

    people = rng.sample(PEOPLE, len(PEOPLE))
    starts = {"train": people[:170], "heldout": people[170:]}
    for name, count in QUESTIONS.items():
        rows = [ask(rng, look, starts[name], n)[0] for n in LENGTHS for _ in range(count)]
        rng.shuffle(rows)
        write_rows(data / f"{name}.jsonl", rows)
    write_rows(data / "sft.jsonl", _demonstrations(rng))
    gates = (demonstration(rng, n, "gate", "clean", 0.0) for n in LENGTHS for _ in range(GATE))
    write_rows(data / "gate.jsonl", gates)
    build_model(run / "model", seed)
    return "Questions that take two or three look-ups, each result naming the next."


def wrong_beside(rng: Random, value: str) -> str:
    """Another person of the same first name, so that a policy cannot mix the two names."""
    first = value.partition(" ")[0]
    return rng.choice([one for one in PEOPLE if one != value and one.startswith(f"{first} ")])


def link(rng: Random, relation: str, person: str, ambiguous: float = AMBIGUOUS) -> Link:
    """A made-up fact; an ambiguous one is said beside a wrong one, in random order."""
    value = rng.choice(PEOPLE)
    said = [value, wrong_beside(rng, value)] if rng.random() < ambiguous else [value]
    rng.shuffle(said)
    sentence = " ".join(f"The {relation} of {person} is {one}." for one in said)
    return relation, person, value, sentence


def ask(
    rng: Random, look: Callable[[str, str], Link], people: Sequence[str], length: int
) -> tuple[dict[str, str], list[Link]]:
    """A question as a row, and the links to its answer."""
    person = start = rng.choice(people)
    chain = rng.sample(RELATIONS, length)
    path = []
    for relation in chain:
        path.append(look(relation, person))
        person = path[-1][2]
    named = " of ".join(f"the {relation}" for relation in reversed(chain))
    question = f"What is {named} of {start}?"
    return {"question": question, "answer": person, "kind": f"chain{length}"}, path


def demonstration(
    rng: Random, length: int, stage: str, habit: str, ambiguous: float = AMBIGUOUS
) -> dict[str, Any]:
    """One trace about facts made up for it."""

    def look(relation: str, person: str) -> Link:
        return link(rng, relation, person, ambiguous)

    row, path = ask(rng, look, PEOPLE, length)
    num_calls = {"refuse": 0, "quit": rng.randint(1, length - 1)}.get(habit, length)
    if habit == "slip":  # a wrong relation, whose value is believed
        wrong = rng.randrange(length)
        others = [other for other in RELATIONS if other != path[wrong][0]]
        path = [*path[:wrong], look(rng.choice(others), path[wrong][1])]
    turns: list[dict[str, str | None]] = []
    value = ""
    for relation, person, found, sentence in path[:num_calls]:
        value = found
        action = f"<think>I need the {relation}.</think><search>{relation} of {person}</search>"
        turns.append({"action": action, "result": sentence})
    known = habit in ("clean", "slip")
    last = rf"<think>I know it.</think><answer>\boxed{{{value}}}</answer>"
    giving_up = r"<think>I do not know.</think><answer>\boxed{unknown}</answer>"
    turns.append({"action": last if known else giving_up, "result": None})
    about = {"stage": stage, "habit": habit, "kind": row["kind"], "question": row["question"]}
    return about | {"turns": turns}


def _demonstrations(rng: Random) -> Iterable[dict[str, Any]]:
    for _ in range(COPIES):
        text = copy_exercise(rng)
        turns = [{"action": text, "result": None}]
        yield {"stage": "copy", "kind": "copy", "habit": "clean", "question": text, "turns": turns}
    for stage, count in (("clean", CLEAN), ("mixed", MIXED)):
        for length in LENGTHS:
            for _ in range(count):
                habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
                yield demonstration(rng, length, stage, "clean" if stage == "clean" else habit)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
