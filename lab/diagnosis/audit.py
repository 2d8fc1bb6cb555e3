"""The audit of a run's rewards: `agentenv doctor audit RUN`.

    regraded           the configured grader gives archived trajectories the same rewards
    jumps of reward    steps whose rewards differ much from those before

A jump of the reward means that the policy has learned the task, or exploits a flaw of its grader;
the trees of the step show which (`agentenv view`).
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, variance
from typing import NoReturn

import msgspec

from agentenv.assembly.checks.checks import Check, CheckResult, CheckRunner, Skip
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import TRAINED
from agentenv.assembly.parts.environments import EnvMaker
from agentenv.assembly.reports.records import FAILED, EvalRow
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.run.terminal import View
from agentenv.base.config import build_config, resolver
from agentenv.base.errors import EXIT_FAILED, ConfigError, DataError
from agentenv.base.model_files import load_tokenizer, read_eos_ids
from agentenv.base.offload import in_thread
from agentenv.contract.env import close_shared
from agentenv.contract.server_config import TEACHER
from agentenv.evaluation.regrade import Graders, UngradedError, regraded
from agentenv.evaluation.run import row_of_path
from agentenv.evaluation.store import load_run_config
from agentenv.lab.diagnosis.doctor import show
from agentenv.rollout.archive import ARCHIVE, Entry
from agentenv.rollout.archive_reader import Step, readable_steps
from agentenv.text.renderer import TextCodec

logger = logging.getLogger(__name__)

NUM_BEFORE = 4  # maximum number of previous steps to compare a step with
LEAST_BEFORE = 2
FAR = 5.0  # standard errors; a larger difference is a jump
LEAST_SHARE = 0.15  # of the range of rewards: minimum size of a jump
NUM_SHOWN = 2  # examples of a problem
TOLERANCE = 1e-6


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 all passed, 1 a check failed, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="agentenv doctor audit",
        description="Regrade the archived trajectories of a training run, and look for jumps in "
        "reward.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, with trees/")
    parser.add_argument(
        "--max-trees", type=int, default=100, metavar="N", help="trees to grade (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args(argv)
    if arguments.max_trees < 1:
        parser.error("--max-trees must be at least 1")
    return exit_code_of(lambda view: run_until_done(_run(arguments, view), view), "the audit")


async def _run(arguments: argparse.Namespace, view: View) -> int:
    results = await audit(arguments.run, arguments.max_trees)
    if arguments.json:
        found = {"verdicts": results}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        for result in results:
            show(result, view)
    return EXIT_FAILED if any(one.state == "failed" for one in results) else 0


async def audit(run: Path, max_trees: int) -> list[CheckResult]:
    """The results. Raises DataError for a folder without a run or trees."""
    config = build_config(TrainConfig, load_run_config(run), str(run))
    steps = readable_steps(run / ARCHIVE, logger.warning)
    if not any(step.entries for step in steps):
        raise DataError(f"{run / ARCHIVE} contains no trees; archive.max_gb = 0 keeps none")
    if config.roles.keys() - {TEACHER}:
        raise ConfigError(
            "roles: the graders of this run use models that the run started; start them with "
            "agentenv serve and set their URLs, or audit without a judge"
        )
    model = find_checkpoint(run)
    tokenizer = await in_thread(load_tokenizer, model, False)
    codec = TextCodec(tokenizer, read_eos_ids(model, tokenizer))
    graders, again = Graders({TRAINED: EnvMaker(config, resolver(run))}), list[Again]()
    try:
        for step, entry in spread(steps, max_trees):
            tree = (await in_thread(step.tree, entry)).tree
            for path in tree.trajectories():
                place = f"step {step.header.step}, tree {tree.index}, branch {path.leaf.branch}"
                row = row_of_path(TRAINED, tree.task, 0, path, codec)
                with suppress(UngradedError):
                    again.append((place, row, await regraded(row, graders)))
    finally:
        await close_shared()
    runner = CheckRunner()
    return [
        await runner.run(Check("regraded", "measured", (), equal_rewards), again),
        await runner.run(Check("jumps of reward", "measured", (), no_jumps), steps),
    ]


def fail(problem: str, remedy: str) -> NoReturn:
    """Raises ConfigError for a failed check; "; " separates problem and remedy."""
    raise ConfigError(f"{problem.replace('; ', ', ')}; {remedy}")


def spread(steps: Sequence[Step], max_trees: int) -> Iterator[tuple[Step, Entry]]:
    """At most `max_trees` trees, evenly spread over all steps."""
    every = [(step, entry) for step in steps for entry in step.entries]
    number = min(max_trees, len(every))
    for place in range(number):
        yield every[place * len(every) // number]


Again = tuple[str, EvalRow, EvalRow]  # place of a trajectory, its row, and its row regraded


async def equal_rewards(again: Sequence[Again]) -> str:
    """Regrading gives the same rewards."""
    if not again:
        raise Skip("no trajectory was graded, or only the environment grades, such as by its state")
    wrong = []
    for place, then, now in again:
        if now.end == FAILED:
            wrong.append(f"{place}: {now.error}")
        elif abs(now.reward - then.reward) > TOLERANCE and then.limit is None:
            wrong.append(f"{place}: {then.reward:g} then, {now.reward:g} now")
    if wrong:
        fail(
            f"{len(wrong)} of {len(again)} rewards differ ({', '.join(wrong[:NUM_SHOWN])})",
            "the grader, its keys or its services have changed since, or it is not deterministic",
        )
    return f"{len(again)} trajectories keep their rewards"


# Steps.


def find_jumps(steps: Sequence[Step]) -> Iterator[str]:
    """Steps whose mean reward differs from that of previous steps by more than FAR standard errors,
    estimated from the variance of trees within a step."""
    means = [[fmean(one.rewards) for one in step.entries if one.rewards] for step in steps]
    every = [value for one in means for value in one]
    span = max(every, default=0.0) - min(every, default=0.0)
    spread_within = [variance(one) for one in means if len(one) > 1]
    deviation = math.sqrt(fmean(spread_within)) if spread_within else 0.0
    for place, now in enumerate(means):
        before = [value for one in means[max(0, place - NUM_BEFORE) : place] for value in one]
        if place < LEAST_BEFORE or len(now) < 2 or len(before) < 2:
            continue
        apart = fmean(now) - fmean(before)
        error = deviation * math.sqrt(1 / len(now) + 1 / len(before))
        error = max(error, 0.02 * span, 1e-9)
        if abs(apart) > FAR * error and abs(apart) > LEAST_SHARE * span:
            step = steps[place].header.step
            yield f"step {step}: {fmean(before):.3g} -> {fmean(now):.3g}"


async def no_jumps(steps: Sequence[Step]) -> str:
    """No step has a jump of its reward."""
    if len(steps) <= LEAST_BEFORE:
        raise Skip(f"{len(steps)} steps are too few")
    if jumps := ", ".join(find_jumps(steps)):
        fail(
            jumps,
            "read trees of these steps with agentenv view: did the policy learn the task, or "
            "exploit its grader?",
        )
    return f"{len(steps)} steps, none with a jump"
