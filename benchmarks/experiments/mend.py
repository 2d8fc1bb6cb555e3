"""The chain of `chain.py` where a mistake shows and can be mended, with exact or noisy rewards.

Two look-ups in five find two values, of which one is right. A look-up about the wrong one finds
"No results.", so that the policy can go back and look up the other: with 6 turns for 2 or 3 links
there is room for 2 or 3 mistakes. The last link is never ambiguous. With `noise`, that share of
trajectories is rewarded the wrong way round; their success stays true.

Most demonstrations are poor on purpose: they give up at once or after any look-up. The others look
the wrong value up first in half of the cases, and mend it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from agentenv.env import Grade, Grader, register
from agentenv.envs.grading.reward import ToolReward
from agentenv.envs.quickstart import PEOPLE, copy_exercise
from agentenv.envs.quickstart_setup import COPIES, GATE, build_model
from agentenv.tool_env import ToolEnv
from agentenv.types import Message, Task
from benchmarks.experiments.chain import LookUp, read_json, write_rows, wrong_beside

MIDDLE, LAST = ("founder", "birthplace", "home"), ("price", "birthyear")
RELATIONS = (*MIDDLE, *LAST)
LENGTHS = (2, 3)
HABITS = {"clean": 0.1, "refuse": 0.3, "quit": 0.6}
QUESTIONS = {"train": 360, "heldout": 160}  # of each length
CLEAN, MIXED = 3000, 1000  # demonstrations of each length
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 320, "max_turns": 6}
AMBIGUOUS = 0.4
PRACTICED = 0.8  # ambiguous look-ups of the demonstrations that teach the skill
SKILL_STEPS = 400
NOTHING = "No results."

register("bench/Mend-v0", "benchmarks.experiments.mend:MendEnv")


class Noisy:
    """A grader whose reward is 1 for wrong and 0 for right in a share of the trajectories: always
    the same ones, by their text."""

    def __init__(self, grader: Grader, share: float) -> None:
        self.grader = grader
        self.share = share

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        grade = await self.grader.grade(task, written, calls)
        text = "\n".join([task.id, *(message.content for message in written)])
        if Random(text).random() >= self.share:
            return grade
        return msgspec.structs.replace(grade, reward=float(not grade.success), parts={})


class MendEnv(ToolEnv):
    """`corpus`: a JSON file from query to result; `dead`: one from question to the queries that
    find nothing there."""

    def __init__(
        self, task: Task, corpus: str, dead: str, noise: float = 0.0, delay_s: float = 0.0
    ) -> None:
        nothing = dict.fromkeys(read_json(dead).get(task.question, ()), NOTHING)
        tools = [LookUp(read_json(corpus) | nothing, delay_s)]
        grader = Noisy(ToolReward(), noise) if noise else ToolReward()
        super().__init__(task, tools=tools, grader=grader)


def configure(raw: dict[str, Any], noise: float = 0.0) -> dict[str, Any]:
    """The quick start's configuration with this task in place of its own."""
    kwargs = {"corpus": "{run}/data/facts.json", "dead": "{run}/data/dead.json", "noise": noise}
    return raw | {
        "run": {"setup": "benchmarks.experiments.mend:prepare"},
        "env": {"id": "bench/Mend-v0", "module": "benchmarks.experiments.mend", "kwargs": kwargs},
        "limits": raw["limits"] | LIMITS | {"max_tool_calls": LIMITS["max_turns"]},
        "sft": _practiced(raw["sft"]),
    }


def _practiced(sft: dict[str, Any]) -> dict[str, Any]:
    """The cold start with more steps on the skills after their gate, which has no dead ends."""
    *before, skills, habits = sft["stages"]
    return sft | {"stages": [*before, skills | {"num_steps": SKILL_STEPS}, habits]}


def prepare(run: Path, seed: int) -> str:
    """Data and an untrained model, as `agentenv.envs.quickstart_setup.prepare`."""
    rng = Random(f"mend {seed}")
    data = run / "data"
    data.mkdir(parents=True, exist_ok=True)
    facts = {(name, one): fact(rng, name, one) for name in RELATIONS for one in PEOPLE}
    results = {one.query: one.result for one in facts.values()}
    (data / "facts.json").write_text(json.dumps(results), encoding="utf-8")

    def look(relation: str, person: str) -> Fact:
        return facts[relation, person]

    people = rng.sample(PEOPLE, len(PEOPLE))
    starts = {"train": people[:170], "heldout": people[170:]}
    dead: dict[str, list[str]] = {}
    for name, count in QUESTIONS.items():
        rows = []
        for length in LENGTHS * count:
            row, path = ask(rng, look, starts[name], length)
            dead[row["question"]] = dead_ends(path)
            rows.append(row)
        rng.shuffle(rows)
        write_rows(data / f"{name}.jsonl", rows)
    (data / "dead.json").write_text(json.dumps(dead), encoding="utf-8")
    write_rows(data / "sft.jsonl", _demonstrations(rng))
    gates = (demonstration(rng, n, "gate", "clean", 0.0) for n in LENGTHS for _ in range(GATE))
    write_rows(data / "gate.jsonl", gates)
    build_model(run / "model", seed)
    return "Questions that take two or three look-ups, whose dead ends show."


class Fact(NamedTuple):
    """The look-up of `relation` of `person`: the right value, and the wrong one beside it."""

    relation: str
    person: str
    value: str
    wrong: str | None
    result: str

    @property
    def query(self) -> str:
        return f"{self.relation} of {self.person}"


def fact(rng: Random, relation: str, person: str, ambiguous: float = AMBIGUOUS) -> Fact:
    """Made up; in two middle links of five a wrong value stands next to the right one."""
    value = rng.choice(PEOPLE)
    wrong = wrong_beside(rng, value)
    said = [value]
    if relation in MIDDLE and rng.random() < ambiguous:
        said = rng.sample([value, wrong], 2)
    result = " ".join(f"The {relation} of {person} is {one}." for one in said)
    return Fact(relation, person, value, wrong if len(said) > 1 else None, result)


def ask(
    rng: Random, look: Callable[[str, str], Fact], people: Sequence[str], length: int
) -> tuple[dict[str, str], list[Fact]]:
    """A question as a row, and the look-ups to its answer."""
    person = start = rng.choice(people)
    chain = [*rng.choices(MIDDLE, k=length - 1), rng.choice(LAST)]
    path = []
    for relation in chain:
        path.append(look(relation, person))
        person = path[-1].value
    named = " of ".join(f"the {relation}" for relation in reversed(chain))
    question = f"What is {named} of {start}?"
    return {"question": question, "answer": person, "kind": f"mend{length}"}, path


def dead_ends(path: Sequence[Fact]) -> list[str]:
    """The queries about wrong values, except those that are on the path as well."""
    right = {one.query for one in path}
    wrong = [f"{name} of {one.wrong}" for one in path if one.wrong for name in RELATIONS]
    return [query for query in wrong if query not in right]


def demonstration(
    rng: Random, length: int, stage: str, habit: str, ambiguous: float = AMBIGUOUS
) -> dict[str, Any]:
    """One trace about facts made up for it."""

    def look(relation: str, person: str) -> Fact:
        return fact(rng, relation, person, ambiguous)

    row, path = ask(rng, look, PEOPLE, length)
    looked: list[tuple[str, str, str]] = []  # relation, query, result
    for before, one in pairwise([None, *path]):
        assert one is not None
        if before is not None and before.wrong is not None and rng.random() < 0.5:
            looked.append((one.relation, f"{one.relation} of {before.wrong}", NOTHING))
        looked.append((one.relation, one.query, one.result))
    most = {"refuse": 0, "quit": rng.randrange(1, len(looked))}.get(habit, len(looked))
    turns: list[dict[str, str | None]] = [
        {
            "action": f"<think>I need the {name}.</think><search>{query}</search>",
            "result": result,
        }
        for name, query, result in looked[: min(most, LIMITS["max_turns"] - 1)]
    ]
    knows = most == len(looked) == len(turns)
    last = rf"<think>I know it.</think><answer>\boxed{{{row['answer']}}}</answer>"
    giving_up = r"<think>I do not know.</think><answer>\boxed{unknown}</answer>"
    turns.append({"action": last if knows else giving_up, "result": None})
    about = {"stage": stage, "habit": habit, "kind": row["kind"], "question": row["question"]}
    return about | {"turns": turns}


def _demonstrations(rng: Random) -> Iterable[dict[str, Any]]:
    for _ in range(COPIES):
        text = copy_exercise(rng)
        turns = [{"action": text, "result": None}]
        yield {"stage": "copy", "kind": "copy", "habit": "clean", "question": text, "turns": turns}
    for stage, count in (("clean", CLEAN), ("mixed", MIXED)):
        for length in LENGTHS * count:
            if stage == "clean":
                yield demonstration(rng, length, stage, "clean", PRACTICED)
                continue
            habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
            yield demonstration(rng, length, stage, habit)
