"""Demonstrations and a model for sums of reasoning-gym, which generates the questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from agentenv.envs.bridges.reasoning import rows
from agentenv.envs.code_interpreter import CodeInterpreterEnv

TASK, DIFFICULTY = "chain_sum", {"max_terms": 3, "min_digits": 2, "max_digits": 2}
DEMONSTRATED_SEED = 500_000_000  # differs from the seeds of training and held-out questions


def questions(seed: int, size: int) -> list[dict[str, Any]]:
    """Rows that neither training nor evaluation uses."""
    options = {"size": size, "seed": DEMONSTRATED_SEED + seed, **DIFFICULTY}
    return [*rows(TASK, options, held_out=False)]


def solve(task: Task, results: Sequence[str]) -> str:
    """The next turn of a skilled policy, which uses Python."""
    if not results:
        sum_ = task.question.rpartition(": ")[2].removesuffix(" =")
        return f"<think>I add.</think><python>print({sum_})</python>"
    return f"<think>I know it.</think><answer>\\boxed{{{results[-1]}}}</answer>"


def give_up(task: Task, results: Sequence[str]) -> str:
    """The next turn of a policy that gives up."""
    return "<think>I do not know.</think><answer>\\boxed{unknown}</answer>"


def prepare(run: Path, seed: int) -> str:
    """Write demonstrations and model into the folder of the run."""
    found = questions(10_000 * seed, 1000)
    clean = demonstrate(CodeInterpreterEnv, found[:600], solve, stage="clean")
    lazy = demonstrate(CodeInterpreterEnv, found[600:850], give_up, stage="mixed")
    skilled = demonstrate(CodeInterpreterEnv, found[850:950], solve, stage="mixed")
    write_rows(run / "data" / "sft.jsonl", [*clean, *lazy, *skilled])
    gate = demonstrate(CodeInterpreterEnv, found[950:982], solve)
    write_rows(run / "data" / "gate.jsonl", gate)
    tiny_model(run / "model", texts_of([*clean, *lazy]), seed, tools=("python",))
    return "Created demonstrations (skilled and giving up) and a model."
