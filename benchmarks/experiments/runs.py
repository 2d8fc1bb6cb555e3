"""Arms of `algorithms.py`, and their quick start runs.

All arms of a seed, FOLDER/seed-N/ARM, share its cold start, FOLDER/seed-N/start: the same weights,
training questions in the same order, held-out questions and sampling seeds. A finished run is kept;
an interrupted run starts over.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentenv.base.errors import DataError
from agentenv.evaluation.store import read_rows
from agentenv.training.loop.brief_reports import EVALUATIONS, PHASES

Raw = dict[str, Any]

CODE = Path(__file__).resolve().parents[2]

CONFIG = CODE / "configs" / "quickstart.toml"
START = "start"
SET = "heldout"

NO_PARTS = {
    "budget_split": False,
    "branch_penalty": 0.0,
    "entropy_balanced_clipping": False,
    "entropy_advantage": 0.0,
}
GROUP_SIZE = 8  # of the arms that fork, and of "grpo"
_FORKING = {"group_size": GROUP_SIZE, "entropy_window": 4}
_NONE = {"name": "aepo", **_FORKING, **NO_PARTS}
ARMS: dict[str, Raw] = {
    "grpo": {"name": "grpo", "group_size": GROUP_SIZE},
    # Smaller groups make fewer calls per update: the best of these arms is the baseline.
    **{f"grpo-{size}": {"name": "grpo", "group_size": size} for size in (6, 5, 4)},
    "arpo": {"name": "arpo", **_FORKING},
    "aepo": {"name": "aepo", **_FORKING},
    # ARPO with one part of AEPO
    "arpo+split": _NONE | {"budget_split": True},
    "arpo+penalty": _NONE | {"branch_penalty": 0.1},
    "arpo+clipping": _NONE | {"entropy_balanced_clipping": True},
    "arpo+advantage": _NONE | {"entropy_advantage": 0.2},
    # ARPO with other fork criteria
    "arpo-coin": {"name": "arpo", **_FORKING, "entropy_weight": 0.0},
    "arpo-relative": {
        "name": "arpo",
        "group_size": GROUP_SIZE,
        "entropy_window": 20,
        "entropy_weight": 0.5,
        "fork_criterion": "relative",
    },
}


def quickstart(config: Path = CONFIG) -> Raw:
    """The base configuration of all runs."""
    return tomllib.loads(config.read_text(encoding="utf-8"))


def start_config(raw: Raw, seed: int, num_questions: int) -> Raw:
    """Only the cold start of a seed."""
    raw = copy.deepcopy(raw)
    raw["run"]["seed"] = seed
    raw["train"] = {"num_steps": 0}
    raw["eval"] = {"sets": {SET: _eval_set("{run}", num_questions, 0)}}
    raw.pop("checkpoint", None)
    return raw


def num_updates(arm: str, of_eight: int) -> int:
    """Updates of an arm for as many trajectories as `of_eight` updates of groups of 8."""
    return math.ceil(of_eight * GROUP_SIZE / int(ARMS[arm]["group_size"]))


def arm_config(
    raw: Raw, algorithm: Raw, start: Path, seed: int, num_steps: int, questions: int
) -> Raw:
    """Reinforcement learning from the weights and data of `start`, evaluated at every update."""
    raw = json.loads(json.dumps(raw).replace("{run}/data", f"{start}/data"))
    raw["run"] = {"seed": seed}
    raw["model"] = {"path": str(start)}
    raw["algorithm"] = dict(algorithm)
    raw["train"] = {"num_steps": num_steps}
    raw["learner"].pop("schedule", None)  # it ends with the quick start's number of updates
    raw["eval"] = {"sets": {SET: _eval_set(str(start), questions, 1)}}
    raw["checkpoint"] = {"every": 0}
    del raw["sft"]
    return raw


def _eval_set(run: str, num_questions: int, every: int) -> Raw:
    return {"path": f"{run}/data/{SET}.jsonl", "max_tasks": num_questions, "every": every}


def train(folder: Path, name: str, raw: Raw) -> bool:
    """Run FOLDER/NAME, one thread per process and at low priority; True on success. Its output goes
    to FOLDER/NAME.log. Raises DataError if a run with other settings is finished."""
    run, config = folder / name, folder / f"{name}.toml"
    if (run / "summary.json").is_file():
        if config.read_text(encoding="utf-8") != to_toml(raw):
            raise DataError(
                f"{run} was made with other settings ({config}); give the same ones, or "
                "another folder"
            )
        return True
    shutil.rmtree(run, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(to_toml(raw), encoding="utf-8")
    command = [sys.executable, "-m", "agentenv.launchers", "train", str(config.resolve())]
    command += [f"run.dir={folder.resolve()}", f"run.name={name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CODE)}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            ["nice", "-n", "10", *command],
            cwd=CODE,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode == 0


def to_toml(raw: Mapping[str, Any]) -> str:
    """TOML with one line per key of the second level; deeper tables are inline."""
    lines = []
    for table, values in raw.items():
        lines.append(f"[{table}]")
        lines += [f"{json.dumps(key)} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)  # JSON and TOML write strings, numbers and booleans alike


COUNTED = {  # the figures of a point, sums over the steps so far
    "calls": "rollout/tool_calls",
    "led": "rollout/led_calls",
    "roots": "rollout/roots",
    "trajectories": "rollout/trajectories",
    "tokens": "learner/num_tokens",
    "learner_s": "learner/cpu_s",
    "wait_s": "time/wait_s",  # for trees
}


def read_arm(run: Path) -> Raw:
    """The results of an arm. By evaluation: the number of updates, the tool calls so far (a shared
    call counts once; those replayed to reach a fork are `led`) and the other sums, and the success
    on each question, in order. `clipped`: the share of trained tokens."""
    total, clipped = dict.fromkeys(COUNTED, 0.0), 0.0
    by_step = {0: dict(total)}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "rollout/tool_calls" in row:
            shares = row.get("learner/clipped_low", 0.0) + row.get("learner/clipped_high", 0.0)
            clipped += shares * row.get("learner/num_tokens", 0.0)
            for name, key in COUNTED.items():
                total[name] += row.get(key, 0.0)
            by_step[row["step"]] = dict(total)
    points = []
    for step, sums in sorted(by_step.items()):
        folder = run / EVALUATIONS / (f"step-{step:06d}" if step else PHASES[0])
        if bits := "".join("1" if row.success else "0" for row in read_rows(folder)):
            points.append({"step": step, **sums, "right": bits})
    if not points or points[0]["step"]:
        raise DataError(f"{run}: no evaluation before the first update")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    figures = {"forks": summary["forks_total"], "cpu_s": summary["cpu_s"]["rl"]}
    return {"points": points, "clipped": clipped / max(total["tokens"], 1.0), **figures}
