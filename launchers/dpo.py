"""Preference training: `python launchers/dpo.py CONFIG [key.sub=value ...] [--resume [WHICH]]`.

Reads pairs of a chosen and a rejected answer and trains the policy's own tokens in them by direct
preference optimization (learners/dpo.py). With --self-critic N, CONFIG is that of a training run
(launchers/train.py) with a table [self_critic]: N rounds in which the policy makes the pairs
itself. See docs/sft.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import sys
from collections.abc import Coroutine, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from agentenv.disk import write_whole
from agentenv.errors import DataError
from launchers.command import Work, make_parser, parse, run_command
from launchers.config import TrainConfig
from launchers.rundir import RunDirectory
from launchers.supervised.config import DPOLoopConfig, DPORunConfig
from launchers.supervised.run import SupervisedAssembly, scored_in_parts, train_supervised
from launchers.terminal import View
from learners.batch import EncodedTree
from learners.dpo import PairTokens, preference_metrics, preference_sums, with_reference
from learners.learner import Learner, Metrics

REFERENCE = "reference.npz"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = make_parser("launchers/dpo.py", "Train a policy on preferences.", DPORunConfig)
    parser.add_argument(
        "--self-critic",
        type=int,
        default=0,
        metavar="N",
        help="N rounds on the policy's own answers; CONFIG is that of a training run",
    )
    arguments = parse(parser, argv)
    if not arguments.self_critic:
        return run_command(arguments, DPORunConfig, prefer)
    return run_command(arguments, TrainConfig, self_critic(arguments.self_critic))


def self_critic(num_rounds: int) -> Work:
    """The run of --self-critic."""

    def work(
        config: TrainConfig, run: RunDirectory, view: View, resume: str
    ) -> Coroutine[Any, Any, None]:
        from launchers.rl.training import Training  # slow to load: mistakes are told before

        return Training(config, run, view, resume=resume).run_rounds(num_rounds)

    return work


async def prefer(config: DPORunConfig, run: RunDirectory, view: View, resume: str) -> None:
    """The whole run."""
    await train_supervised(config, Preference.of, run, view, resume)


class Preference:
    """Pairs with the reference's log-probs; a row is a pair."""

    name = "dpo"
    plotted: tuple[str, ...] = ("loss", "accuracy", "margin")

    def __init__(
        self,
        learner: Learner,
        pairs: Sequence[EncodedTree],
        held_out: Sequence[EncodedTree],
        config: DPOLoopConfig,
    ) -> None:
        self.learner = learner
        self.pairs = pairs
        self.num_rows = len(pairs)
        self.held_out = held_out
        self.beta = config.beta

    @classmethod
    async def of(cls, assembly: SupervisedAssembly) -> Preference:
        """The pairs of the configuration, scored by the reference policy."""
        loaded, learner, loop = (
            await assembly.rows(),
            await assembly.learner(),
            assembly.config.loop,
        )
        assert isinstance(loop, DPOLoopConfig)
        together, path = [*loaded.train, *loaded.eval], assembly.folder / REFERENCE
        if loop.reference == "adapter_off":
            together = await scored_by(learner, together, adapters=False)
        elif assembly.checkpoint is not None:
            together = restored(path, together)
        else:
            together = await scored_by(learner, together)
            keep(path, together)
        size = len(loaded.train)
        return cls(learner, together[:size], together[size:], loop)

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One step on the mean over the pairs."""
        return await self.learner.prefer([self.pairs[row] for row in rows], self.beta, lr_scale)

    async def measure(self) -> Metrics:
        """See `learners.dpo.preference_metrics`."""
        if not self.held_out:
            return {}
        parts, rest = [], iter(self.held_out)
        async for scores in scored_in_parts(self.learner, self.held_out):
            tokens = PairTokens.of([next(rest) for _ in scores])
            logprobs = np.concatenate([score.logprobs for score in scores])
            parts.append(preference_sums(tokens, logprobs, self.beta))
        found = preference_metrics(parts)
        return {name: value for name, value in found.items() if not name.startswith("num_")}


async def scored_by(
    learner: Learner, pairs: Sequence[EncodedTree], *, adapters: bool = True
) -> list[EncodedTree]:
    """The pairs with the log-probs that the learner has now, of the reference policy."""
    found: list[EncodedTree] = []
    rest = iter(pairs)
    async for scores in scored_in_parts(learner, pairs, adapters=adapters):
        found += [with_reference(next(rest), score.logprobs) for score in scores]
    return found


def keep(path: Path, pairs: Sequence[EncodedTree]) -> None:
    """Write the reference's log-probs beside the run, for a resume."""
    tokens = np.concatenate([pair.ints("token_ids") for pair in pairs])
    data = BytesIO()
    np.savez(data, logprobs=PairTokens.of(pairs).reference, token_ids=tokens)
    write_whole(path, data.getvalue())


def restored(path: Path, pairs: Sequence[EncodedTree]) -> list[EncodedTree]:
    """The pairs with the log-probs that `keep` wrote. Raises DataError if they are of others."""
    try:
        with np.load(path) as saved:
            logprobs, token_ids = saved["logprobs"], saved["token_ids"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: the reference's log-probs cannot be read: {error}") from error
    if not np.array_equal(token_ids, np.concatenate([pair.ints("token_ids") for pair in pairs])):
        raise DataError(
            f"{path}: the reference's log-probs are of other pairs; the data or its keys have "
            "changed since the run began"
        )
    cuts = np.cumsum([pair.num_action_tokens for pair in pairs])[:-1]
    parts = np.split(logprobs, cuts)
    return [with_reference(pair, part.tolist()) for pair, part in zip(pairs, parts, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
