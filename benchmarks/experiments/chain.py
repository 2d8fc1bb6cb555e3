"""Longer tasks for `algorithms.py --task chain | mend | noisy`: look-ups that need two or three
calls, of a tool whose queries the policy has to learn from rewards.

    What is the home of the price of the founder of Kaldan Arbow?

Every link is a look-up whose result says what to look up next. A query has three forms ("founder of
Kaldan Arbow", "the founder of Kaldan Arbow", "founder Kaldan Arbow"), and the tool understands one
of them: which one depends on the relation and on the seed, so that a policy has three things to
find out. In `chain` another form finds a wrong person: a mistake is fatal and does not show. In
`mend` it finds "No results.", and another form can be tried: with 6 turns for 2 or 3 links there is
room for 2 or 3 mistakes. `noisy` is `mend` with a tenth of the rewards the wrong way round.

Facts are invented, and so are their relations: they are named by words that the tokenizer of the
quick start has. Training and held-out questions begin at different people. As in the quick start,
the cold start first teaches the skill (all forms alike, each of which finds the right value), then
poor habits on purpose: at least half of the look-ups take a wrong form, and many traces give up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from agentenv.base.types import Message, Task, ToolResult
from agentenv.contract.env import Grade, Grader
from agentenv.contract.env_registry import register
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.grading.reward import ToolReward
from agentenv.envs.quickstart.setup import COPIES, GATE, build_model
from agentenv.envs.quickstart.world import PEOPLE, copy_exercise

RELATIONS = ("founder", "price", "home")
FORMS = ("{relation} of {person}", "the {relation} of {person}", "{relation} {person}")
LENGTHS = (2, 3)
QUESTIONS = {"train": 360, "heldout": 160}  # of each length
CLEAN, PRACTICE, MIXED = 2500, 2500, 1000  # demonstrations of each length
PRACTICE_STEPS = {"chain": 200, "mend": 400}  # dead ends take longer
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 320, "max_turns": 6}
NOTHING = "No results."
HINTED = (
    "-hinted"  # suffix of a task whose cold start also teaches to repeat an attempt that was read
)


class Habits(NamedTuple):
    """Shares of the demonstrations that the cold start ends with."""

    refuse: float  # give up at once
    quit: float  # give up after any look-up
    right: float  # look-ups in the form that the tool understands
    again: float  # look-ups that found nothing and are tried in another form


HABITS = {
    "chain": Habits(refuse=0.2, quit=0.2, right=0.5, again=0.0),
    "mend": Habits(refuse=0.2, quit=0.2, right=0.35, again=0.5),
}

register("bench/Chain-v0", "benchmarks.experiments.chain:ChainEnv")


class LookUp(StatelessTool):
    """The value of a fact, by its query."""

    name = "search"
    description = "Look a fact up."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self, facts: Mapping[str, str], delay_s: float) -> None:
        self.facts = facts
        self.delay_s = delay_s

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        await asyncio.sleep(self.delay_s)
        query = str(arguments["query"]).strip()
        return ToolResult(self.facts.get(query, NOTHING))


@cache
def read_facts(path: str) -> dict[str, str]:
    """Read once in a process."""
    found: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


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


class ChainEnv(ToolEnv):
    """Follow a chain of facts. `corpus` is a JSON object from query to result."""

    def __init__(self, task: Task, corpus: str, noise: float = 0.0, delay_s: float = 0.0) -> None:
        tools = [LookUp(read_facts(corpus), delay_s)]
        grader = Noisy(ToolReward(), noise) if noise else ToolReward()
        super().__init__(task, tools=tools, grader=grader)


def configure(raw: dict[str, Any], name: str, noise: float = 0.0) -> dict[str, Any]:
    """The quick start's configuration with the task `name` of `HABITS` in place of its own."""
    kwargs = {"corpus": "{run}/data/facts.json", "noise": noise}
    copies, skills, practice, habits = raw["sft"]["stages"]
    base, limits = name.removesuffix(HINTED), dict(LIMITS)
    num_steps, is_hinted = PRACTICE_STEPS[base], base != name
    if is_hinted:
        num_steps, habits = 2 * num_steps, habits | {"num_steps": 2 * habits["num_steps"]}
        limits["max_tool_result_tokens"] = 96  # the question is read again
    practice = practice | {"rows": "practice", "num_steps": num_steps}
    return raw | {
        "run": {"setup": f"benchmarks.experiments.chain:prepare_{name.replace('-', '_')}"},
        "env": {"id": "bench/Chain-v0", "module": "benchmarks.experiments.chain", "kwargs": kwargs},
        "limits": raw["limits"] | limits | {"max_tool_calls": LIMITS["max_turns"]},
        "sft": raw["sft"] | {"stages": [copies, skills, practice, habits]},
    }


def prepare_chain(run: Path, seed: int) -> str:
    """Data and an untrained model, as `agentenv.envs.quickstart.setup.prepare`."""
    return _prepare(run, seed, "chain")


def prepare_mend(run: Path, seed: int) -> str:
    """As `prepare_chain`."""
    return _prepare(run, seed, "mend")


def prepare_chain_hinted(run: Path, seed: int) -> str:
    """As `prepare_chain`; the cold start also teaches to repeat an attempt that was read."""
    return _prepare(run, seed, "chain", is_hinted=True)


def prepare_mend_hinted(run: Path, seed: int) -> str:
    """As `prepare_chain_hinted`."""
    return _prepare(run, seed, "mend", is_hinted=True)


def _prepare(run: Path, seed: int, name: str, *, is_hinted: bool = False) -> str:
    rng = Random(f"{name} {seed}")
    data = run / "data"
    data.mkdir(parents=True, exist_ok=True)
    world = World(rng, shows=name == "mend")
    (data / "facts.json").write_text(json.dumps(world.results), encoding="utf-8")
    people = rng.sample(PEOPLE, len(PEOPLE))
    starts = {"train": people[:170], "heldout": people[170:]}
    for part, count in QUESTIONS.items():
        rows = [world.question(rng, starts[part], n) for n in LENGTHS for _ in range(count)]
        rng.shuffle(rows)
        write_rows(data / f"{part}.jsonl", rows)
    rows = list(_demonstrations(rng, world.forms, name))
    again = (repeated(one) for one in rows if one["stage"] in ("practice", "mixed"))
    write_rows(data / "sft.jsonl", [*rows, *again] if is_hinted else rows)
    gate = (demonstration(rng, n, "gate", first_form) for n in LENGTHS for _ in range(GATE))
    write_rows(data / "gate.jsonl", gate)
    build_model(run / "model", seed)
    return "Questions that take two or three look-ups, each result naming the next."


class World:
    """Facts, and for each relation the form of a query that the tool understands (an index of
    `FORMS`). Unless mistakes show, another form finds another person."""

    def __init__(self, rng: Random, shows: bool) -> None:
        kinds = [index % len(FORMS) for index in range(len(RELATIONS))]
        self.forms = dict(zip(RELATIONS, rng.sample(kinds, len(kinds)), strict=True))
        self.values = {(name, one): rng.choice(PEOPLE) for name in RELATIONS for one in PEOPLE}
        self.results: dict[str, str] = {}  # by query
        for (relation, person), value in self.values.items():
            for form in range(len(FORMS)):
                if form == self.forms[relation]:
                    self.results[query(form, relation, person)] = say(relation, person, value)
                elif not shows:
                    other = rng.choice([one for one in PEOPLE if one != value])
                    self.results[query(form, relation, person)] = say(relation, person, other)

    def question(self, rng: Random, people: Sequence[str], length: int) -> dict[str, str]:
        """As a row."""
        start, chain = rng.choice(people), rng.sample(RELATIONS, length)
        person = start
        for relation in chain:
            person = self.values[relation, person]
        return {"question": ask(start, chain), "answer": person, "kind": f"chain{length}"}


def query(form: int, relation: str, person: str) -> str:
    return FORMS[form].format(relation=relation, person=person)


def say(relation: str, person: str, value: str) -> str:
    return f"The {relation} of {person} is {value}."


def ask(start: str, chain: Sequence[str]) -> str:
    named = " of ".join(f"the {relation}" for relation in reversed(chain))
    return f"What is {named} of {start}?"


def demonstration(
    rng: Random,
    length: int,
    stage: str,
    tries: Callable[[Random, str], Sequence[tuple[int, bool]]],
    most: int | None = None,
) -> dict[str, Any]:
    """One trace about facts made up for it. `tries` has the queries of a look-up, by their form,
    and whether each finds something; a look-up without success, or more than `most` of them, end
    it."""
    start, chain = rng.choice(PEOPLE), rng.sample(RELATIONS, length)
    person, knows = start, most is None
    turns: list[dict[str, str | None]] = []
    for relation in chain[:most]:
        value = rng.choice(PEOPLE)
        found = False
        for form, found in tries(rng, relation):
            text = f"<search>{query(form, relation, person)}</search>"
            action = f"<think>I need the {relation}.</think>{text}"
            result = say(relation, person, value) if found else NOTHING
            turns.append({"action": action, "result": result})
        if not found:
            knows = False
            break
        person = value
    last = rf"<think>I know it.</think><answer>\boxed{{{person}}}</answer>"
    giving_up = r"<think>I do not know.</think><answer>\boxed{unknown}</answer>"
    turns.append({"action": last if knows else giving_up, "result": None})
    about = {"stage": stage, "kind": f"chain{length}", "question": ask(start, chain)}
    return about | {"turns": turns}


def repeated(row: Mapping[str, Any]) -> dict[str, Any]:
    """The demonstration twice, so that the policy learns to repeat an attempt that it reads."""
    messages = [{"role": "user", "content": row["question"]}]
    for turn in row["turns"]:
        messages.append({"role": "assistant", "content": turn["action"]})
        if turn["result"] is not None:
            messages.append({"role": "tool", "content": turn["result"]})
    return {"stage": row["stage"], "kind": row["kind"], "messages": messages * 2}


def first_form(rng: Random, relation: str) -> list[tuple[int, bool]]:
    return [(0, True)]


def any_form(shows: bool) -> Callable[[Random, str], list[tuple[int, bool]]]:
    """All forms alike; where mistakes show, a query in three finds nothing before another does."""

    def tries(rng: Random, relation: str) -> list[tuple[int, bool]]:
        one, other = rng.sample(range(len(FORMS)), 2)
        return [(one, False), (other, True)] if shows and rng.random() < 0.3 else [(one, True)]

    return tries


def poor_form(
    forms: Mapping[str, int], habits: Habits, shows: bool
) -> Callable[[Random, str], list[tuple[int, bool]]]:
    """The habits."""

    def tries(rng: Random, relation: str) -> list[tuple[int, bool]]:
        right = forms[relation]
        others = [form for form in range(len(FORMS)) if form != right]
        if rng.random() < habits.right:
            return [(right, True)]
        wrong = rng.sample(others, len(others))
        if not shows:
            return [(wrong[0], True)]
        if rng.random() >= habits.again:
            return [(wrong[0], False)]
        return [(wrong[0], False), rng.choice([(wrong[1], False), (right, True)])]

    return tries


def _demonstrations(rng: Random, forms: Mapping[str, int], name: str) -> Iterable[dict[str, Any]]:
    habits, shows = HABITS[name], name == "mend"
    for _ in range(COPIES):
        text = copy_exercise(rng)
        turns = [{"action": text, "result": None}]
        yield {"stage": "copy", "kind": "copy", "question": text, "turns": turns}
    for length in LENGTHS:
        for _ in range(CLEAN):
            yield demonstration(rng, length, "clean", first_form)
        for _ in range(PRACTICE):
            yield demonstration(rng, length, "practice", any_form(shows))
        for _ in range(MIXED):
            kinds = {None: 1 - habits.refuse - habits.quit, 0: habits.refuse, -1: habits.quit}
            most = rng.choices(list(kinds), list(kinds.values()))[0]
            most = rng.randrange(1, length) if most == -1 else most
            yield demonstration(rng, length, "mixed", poor_form(forms, habits, shows), most)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
