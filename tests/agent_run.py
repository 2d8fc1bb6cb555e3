"""The saving by forks for an unmodified agent: `make long PARTS=agent`.

examples/agent is trained with and without forks (all of a group from scratch) from equal seeds. For
each run: tool calls, calls of the policy and programs up to the first of two updates in a row with
a success of 0.9 on questions that are new. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.9
ARMS = {"forks": (), "no forks": ("algorithm.initial_rollouts=6",)}
KEYS = ("train.num_steps=12", "eval.sets={}", "run.name=run")


class Needed(NamedTuple):
    """Up to the goal, or to the end of the run where it was missed."""

    update: int
    tool_calls: int
    policy_calls: int
    programs: int
    forks: int
    reached: bool


def needed(folder: Path) -> Needed:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rollout/tool_calls" in row]
    good = [row["reward/success"] >= GOAL for row in rows]
    found = next((at for at in range(len(rows) - 1) if good[at] and good[at + 1]), None)
    upto = rows if found is None else rows[: found + 1]
    total = {
        name: sum(row[f"rollout/{name}"] for row in upto)
        for name in ("tool_calls", "trajectories", "forks")
    }
    return Needed(
        len(upto),
        total["tool_calls"],
        int(upto[-1]["engine/requests"]),  # those under way too
        total["trajectories"],
        total["forks"],
        found is not None,
    )


def trained(seed: int, overrides: tuple[str, ...]) -> Needed:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentenv.launchers", "train", "examples/agent/train.toml"]
        keys = [*KEYS, *overrides, f"run.seed={seed}", f"run.dir={folder}"]
        done = subprocess.run([*command, *keys], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return needed(Path(folder) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", type=int, default=5, metavar="NUMBER")
    options = parser.parse_args()
    print(f"| seed | | update of {GOAL} | tool calls | policy calls | programs | forks |")
    print("|---|---|---|---|---|---|---|")
    found: dict[str, list[Needed]] = {name: [] for name in ARMS}
    for seed in range(options.first, options.first + options.seeds):
        for name, overrides in ARMS.items():
            one = trained(seed, overrides)
            found[name].append(one)
            update = str(one.update) if one.reached else f"none in {one.update}"
            print(f"| {seed} | {name} | {update} | {' | '.join(map(str, one[1:-1]))} |", flush=True)
    for place, what in ((1, "tool calls"), (2, "policy calls")):
        shares = [
            a[place] / b[place] for a, b in zip(found["forks"], found["no forks"], strict=True)
        ]
        each = ", ".join(f"{share:.2f}" for share in shares)
        median = statistics.median(shares)
        print(f"{what} with forks over those without: {each}; median {median:.2f}")


if __name__ == "__main__":
    main()
