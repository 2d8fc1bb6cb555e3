"""Demonstrations and a model for the frozen lake, a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from agentenv import Task, demonstrate, texts_of, tiny_model, write_rows
from agentenv.envs.bridges.gymnasium_env import GymnasiumEnv, rows

ID, QUESTION = "FrozenLake-v1", "Walk to the goal."
ACTIONS = ("left", "down", "right", "up")
LAKE = {"id": ID, "actions": [*ACTIONS], "options": {"is_slippery": False, "max_episode_steps": 16}}
WAY = {"0": "down", "1": "right", "2": "down", "3": "left", "4": "down", "6": "down"}
WAY |= {"8": "right", "9": "down", "10": "down", "13": "right", "14": "right"}


def questions(seed: int, size: int) -> list[dict[str, Any]]:
    """Rows with seeds that neither training nor evaluation uses."""
    options = {"size": size, "seed": 500_000_000 + seed, "question": QUESTION}
    return [*rows(ID, options, held_out=False)]


def walk(task: Task, results: Sequence[str], skill: float = 1.0) -> str:
    """The next turn of a policy that knows the way with this probability, else guesses."""
    rng = Random(f"{task.id} {len(results)}")
    state = results[-1] if results else "0"
    action = WAY[state] if rng.random() < skill else rng.choice(ACTIONS)
    return f"<step>{action}</step>"


def prepare(run: Path, seed: int) -> str:
    """Write demonstrations and model into the folder of the run."""
    found, make = questions(10_000 * seed, 632), partial(GymnasiumEnv, **LAKE)
    poor = demonstrate(make, found[:600], partial(walk, skill=0.4), stage="mixed")
    write_rows(run / "data" / "sft.jsonl", poor)
    write_rows(run / "data" / "gate.jsonl", demonstrate(make, found[600:], walk))
    tiny_model(run / "model", texts_of(poor), seed, tools=("step",))
    return "Created demonstrations of a policy that mostly guesses, and a model."
