"""Tasks that say where the unlearned turns lie: `late-8`, `early-8`, `mixed-8`, `late-3`, ... of
the study.

    Climb red 57.                                                     (ends at rung 8)
    <step>left</step>  ->  red 01,   <step>up</step>  ->  red 02,  ...  red top

Each rung of each of the six kinds of ladder has one right move of six, drawn with the seed. A wrong
one does not show, and nothing repairs it: only a climb without a mistake has the reward 1. The cold
start teaches the policy the form, the right move with 0.97 on mastered rungs and with 0.5 on
unlearned ones, half of all: the last (`late`), the first (`early`), or every other one (`mixed`).
So one in eighteen climbs of eight rungs succeeds at first, whatever the profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv.adapters.cold_start import tiny_model, write_rows
from agentenv.base.types import Message, Task, ToolResult
from agentenv.contract.env import Grade
from agentenv.contract.env_registry import register
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from benchmarks.experiments.chain import HINTED, repeated

KINDS = ("red", "blue", "green", "black", "white", "brown")
MOVES = ("left", "right", "up", "down", "jump", "wait")
PROFILES = ("late", "early", "mixed")
MASTERED, UNLEARNED = 0.97, 0.5  # chance of the right move after the cold start
NUMBERS = {"train": range(60), "heldout": range(60, 100)}
DEMONSTRATIONS = 4000
TOP = "top"
HINTED_STEPS = 600  # of the cold start that also teaches to repeat an attempt
LIMITS = {"max_prompt_tokens": 32, "max_turn_tokens": 8, "max_tool_result_tokens": 8}

register("bench/Ladder-v0", "benchmarks.experiments.ladder:LadderEnv")


class Step(StatelessTool):
    """The next rung. An episode's state is its kind and the rungs climbed."""

    name = "step"
    description = "Make a move."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"move": {"type": "string"}},
        "required": ["move"],
    }
    fork_mode = "snapshot"

    def __init__(self, kind: str, rungs: int) -> None:
        self.kind, self.rungs = kind, rungs

    def start(self, seed: int | None) -> list[int]:
        return [0]

    async def fork(self, state: list[int]) -> list[int]:
        return list(state)

    async def call(self, arguments: dict[str, Any], state: list[int]) -> ToolResult:
        state[0] += 1
        return ToolResult(shown(self.kind, state[0], self.rungs))


class Climb:
    """The grader: 1 for the right moves in order, then an answer."""

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        text = "".join(message.content for message in written)
        moves = [one.strip() for one in re.findall(r"<step>(.*?)</step>", text)]
        right = moves == task.answers[0].split() and "</answer>" in text
        return Grade(float(right), right)


class LadderEnv(ToolEnv):
    """A ladder of as many rungs as the answer has moves; its kind is the task's."""

    def __init__(self, task: Task) -> None:
        rungs = len(task.answers[0].split())
        super().__init__(task, tools=[Step(task.kind, rungs)], grader=Climb())


def shown(kind: str, rung: int, rungs: int) -> str:
    return f"{kind} {TOP if rung >= rungs else f'{rung:02d}'}"


def unlearned(profile: str, rungs: int) -> set[int]:
    """The rungs that the cold start leaves unlearned: half of all, the middle one included."""
    half = (rungs + 1) // 2
    start, step = {"late": (rungs - half, 1), "early": (0, 1), "mixed": (0, 2)}[profile]
    return set(range(start, start + half * step, step))


def configure(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The quick start's configuration with the task `name`, as `late-8`."""
    rungs = int(name.split("-")[1])
    stage = {"rows": "habits", "num_steps": 250, "batch_size": 16, "lr_scale": [0.5, 0.05]}
    if name.endswith(HINTED):
        stage["num_steps"] = HINTED_STEPS
    limits = {"max_response_tokens": 16 * rungs + 16, "max_turns": rungs + 1}
    if name.endswith(HINTED):
        limits["max_tool_result_tokens"] = 32  # the question is read again
    sft = raw["sft"] | {"gate_threshold": 0.0}  # moves are drawn: nothing has to match
    return raw | {
        "run": {"setup": f"benchmarks.experiments.ladder:prepare_{name.replace('-', '_')}"},
        "env": {"id": "bench/Ladder-v0", "module": "benchmarks.experiments.ladder"},
        "limits": raw["limits"] | LIMITS | limits | {"max_tool_calls": rungs},
        "sft": sft | {"stages": [stage]},
    }


def __getattr__(name: str) -> Any:
    """`prepare_PROFILE_RUNGS`: writes data and an untrained model into the folder of a run."""
    if (found := re.fullmatch(rf"prepare_({'|'.join(PROFILES)})_(\d+)(_hinted)?", name)) is None:
        raise AttributeError(name)
    profile, rungs, is_hinted = found[1], int(found[2]), bool(found[3])
    return lambda run, seed: prepare(run, seed, profile, rungs, is_hinted=is_hinted)


def prepare(run: Path, seed: int, profile: str, rungs: int, *, is_hinted: bool = False) -> str:
    rng = Random(f"ladder {profile} {rungs} {seed}")
    right = {kind: rng.choices(MOVES, k=rungs) for kind in KINDS}
    data = run / "data"
    for part, numbers in NUMBERS.items():
        rows = [
            {"question": ask(kind, n), "answer": " ".join(right[kind]), "kind": kind}
            for n in numbers
            for kind in KINDS
        ]
        rng.shuffle(rows)
        write_rows(data / f"{part}.jsonl", rows)
    hard = unlearned(profile, rungs)
    demonstrations = [demonstration(rng, right, hard) for _ in range(DEMONSTRATIONS)]
    again = [repeated(row) for row in demonstrations] if is_hinted else []
    write_rows(data / "sft.jsonl", demonstrations + again)
    write_rows(data / "gate.jsonl", [demonstration(rng, right, hard) for _ in range(8)])
    texts = [
        text
        for row in demonstrations[:50]
        for turn in row["turns"]
        for text in turn.values()
        if text
    ]
    words = (*KINDS, *MOVES, TOP, *ask("red", 0).split())
    tiny_model(run / "model", texts, seed, tools=["step"], words=words)
    return f"Ladders of {rungs} rungs; the {profile} ones are unlearned."


def ask(kind: str, number: int) -> str:
    return f"Climb {kind} {number:02d}."


def demonstration(
    rng: Random, right: Mapping[str, Sequence[str]], hard: set[int]
) -> dict[str, Any]:
    """One climb; others of its moves are wrong, all alike."""
    kind = rng.choice(KINDS)
    turns: list[dict[str, str | None]] = []
    for rung, best in enumerate(right[kind]):
        is_right = rng.random() < (UNLEARNED if rung in hard else MASTERED)
        move = best if is_right else rng.choice([one for one in MOVES if one != best])
        result = shown(kind, rung + 1, len(right[kind]))
        turns.append({"action": f"<step>{move}</step>", "result": result})
    turns.append({"action": f"<answer>{TOP}</answer>", "result": None})
    question = ask(kind, rng.randrange(100))
    return {"stage": "habits", "kind": kind, "question": question, "turns": turns}
