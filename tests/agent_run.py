"""The cost of learning, by pairs of runs from equal seeds: `make long PARTS="agent stranger"`.

agent     examples/agent with and without forks (all of a group from scratch). For each run: tool
          calls, calls of the policy and programs up to the first of two updates in a row with a
          success of 0.9 on questions that are new. Nothing is asserted.
stranger  An agent of pydantic-ai (tests/programs/pydantic_ai), and its task as an environment, with
          one cold start and equal updates. Both must learn, with every replay exact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import read_step

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.9
ARMS = {"forks": (), "no forks": ("algorithm.initial_rollouts=6",)}
KEYS = ("train.num_steps=12", "eval.sets={}")
STRANGER = "pydantic_ai"
PACKAGES = ROOT / ".programs" / STRANGER
PAIR = {
    STRANGER: (
        f'env.kwargs.program.command=["{PACKAGES}/bin/python", "agent.py", "{{question}}"]',
        f'env.kwargs.program.read_only=["{PACKAGES}"]',
        f"env.kwargs.program.folder=tests/programs/{STRANGER}",
    ),
    "environment": ('env={id = "examples.agent.world:TwinEnv"}',),
}


class Needed(NamedTuple):
    """Up to the goal, or to the end of the run where it was missed."""

    update: int
    tool_calls: int
    policy_calls: int
    programs: int
    forks: int
    reached: bool


def updates(run: Path) -> list[dict[str, Any]]:
    """Their metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "rollout/tool_calls" in row]


def needed(run: Path) -> Needed:
    rows = updates(run)
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


def spent(run: Path) -> dict[str, Any]:
    """What the updates took. Raises SystemExit unless the policy has learned."""
    rows, summary = updates(run), json.loads((run / "summary.json").read_text())
    before, after = (summary["success"][when] for when in ("after_sft", "after_rl"))
    replays, exact = (rows[-1].get(f"env/program/replays{end}", 0) for end in ("", "_exact"))
    steps = map(read_step, steps_of(run / "trees").values())
    nodes = [node for step in steps for kept in step.trees() for node in kept.tree.nodes]
    places = sum(node.num_forks is not None for node in nodes)
    programs = sum(node.info.get("program", {}).get("cpu_s", 0.0) for node in nodes)
    found = {
        "held-out success": f"{before:.2f} -> {after:.2f}",
        "success by update": " ".join(f"{row['reward/success']:.2f}" for row in rows),
        "trajectories": summary["rollouts"]["trajectories"],
        "forks, of places": f"{summary['forks_total']}, {places}",
        "further contexts": sum("context" in node.info for node in nodes),
        "tool calls": summary["tool_calls_total"],
        "policy calls": sum(bool(node.action_ids) for node in nodes),
        "CPU s, of programs": f"{summary['cpu_s']['rl']:.0f}, {programs:.0f}",
        "wall s": f"{summary['wall_s']['rl']:.0f}",
    }
    if summary["rollouts"]["failed"] or exact < replays or after < max(0.8, before + 0.2):
        raise SystemExit(f"{replays - exact} replays differ; {summary['rollouts']}; {found}")
    return found


def trained(read: Callable[[Path], Any], *keys: str) -> Any:
    """What `read` finds in the folder of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentenv.launchers", "train", "examples/agent/train.toml"]
        command += [*keys, f"run.dir={folder}", "run.name=run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        return read(Path(folder) / "run")


def beside(seed: int) -> None:
    subprocess.run(["sh", ".ci/program", STRANGER], cwd=ROOT, check=True)
    found = [trained(spent, *keys, f"run.seed={seed}") for keys in PAIR.values()]
    print(f"| | {' | '.join(PAIR)} |\n|---|---|---|")
    for name in found[0]:
        print(f"| {name} | {' | '.join(str(one[name]) for one in found)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("agent", "stranger"))
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seeds", type=int, default=5, metavar="NUMBER")
    options = parser.parse_args()
    if options.part == "stranger":
        return beside(options.first)
    print(f"| seed | | update of {GOAL} | tool calls | policy calls | programs | forks |")
    print("|---|---|---|---|---|---|---|")
    found: dict[str, list[Needed]] = {name: [] for name in ARMS}
    for seed in range(options.first, options.first + options.seeds):
        for name, overrides in ARMS.items():
            one = trained(needed, *KEYS, *overrides, f"run.seed={seed}")
            found[name].append(one)
            update = str(one.update) if one.reached else f"none in {one.update}"
            print(f"| {seed} | {name} | {update} | {' | '.join(map(str, one[1:-1]))} |", flush=True)
    for place, what in ((1, "tool calls"), (2, "policy calls")):
        shares = [a[place] / b[place] for a, b in zip(*found.values(), strict=True)]
        each = ", ".join(f"{share:.2f}" for share in shares)
        print(f"{what} with forks over those without: {each}; median {median(shares):.2f}")


if __name__ == "__main__":
    main()
