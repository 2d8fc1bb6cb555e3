"""Supervised fine-tuning: `python launchers/sft.py CONFIG [key.sub=value ...] [--resume [WHICH]]`.

Reads dialogues (ShareGPT, messages, Alpaca, LLaMA-Factory's dataset_info.json), trains what the
policy wrote in them with the learner and the renderer of reinforcement learning, and writes a run
directory whose checkpoints `launchers/train.py` starts from (model.path). See docs/sft.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np

from launchers.command import make_parser, parse, run_command
from launchers.rundir import RunDirectory
from launchers.supervised.config import SFTRunConfig
from launchers.supervised.data import load_examples
from launchers.supervised.encoding import Example
from launchers.supervised.run import Supervised, begin, check_lengths, fill_rows, scored_in_parts
from launchers.terminal import View
from learners.learner import Learner, Metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = make_parser("launchers/sft.py", "Fine-tune a policy on dialogues.", SFTRunConfig)
    return run_command(parse(parser, argv), SFTRunConfig, fine_tune)


async def fine_tune(config: SFTRunConfig, run: RunDirectory, view: View, resume: str) -> None:
    """The whole run."""
    async with AsyncExitStack() as stack:
        start = await begin(config, run, view, resume)
        examples = await asyncio.to_thread(
            load_examples,
            config.data,
            start.encoder,
            run.resolve,
            config.run.seed,
            view.say,
        )
        check_lengths([len(e.token_ids) for part in examples for e in part], start, config.data)
        rows = [[place] for place in range(len(examples.train))]
        if config.sft.packing:
            lengths = [len(example.token_ids) for example in examples.train]
            rows = fill_rows(lengths, config.data.max_length, config.run.seed)
        learner = await start.learner(config.learner, config.run.seed, stack)
        lessons = Imitation(learner, examples.train, rows, examples.eval)
        await Supervised(
            config,
            config.sft,
            config.checkpoint,
            config.learner,
            config.run.seed,
            run,
            view,
            learner,
            lessons,
            start.checkpoint,
        ).run_all()


class Imitation:
    """Sequences to imitate; a row holds one of them, or several with packing."""

    name = "sft"
    plotted: tuple[str, ...] = ("loss",)

    def __init__(
        self,
        learner: Learner,
        examples: Sequence[Example],
        rows: Sequence[Sequence[int]],
        held_out: Sequence[Example],
    ) -> None:
        self.learner = learner
        self.examples = examples
        self.rows = rows
        self.num_rows = len(rows)
        self.held_out = held_out

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One step on the mean over all tokens of the policy in the rows."""
        chosen = [self.examples[place] for row in rows for place in self.rows[row]]
        return await self.learner.imitate([example.encoded() for example in chosen], lr_scale)

    async def measure(self) -> Metrics:
        """Mean negative log-likelihood of a token, nats; share of tokens that are the likeliest;
        share of sequences of which all are."""
        if not self.held_out:
            return {}
        count, exact = 0, 0
        sums = np.zeros(2)
        async for scores in scored_in_parts(
            self.learner, (example.encoded() for example in self.held_out)
        ):
            for score in scores:
                count += len(score.logprobs)
                sums += [-sum(score.logprobs), sum(score.matches)]
                exact += all(score.matches)
        return {
            "loss": float(sums[0] / count),
            "token_accuracy": float(sums[1] / count),
            "exact_match": exact / len(self.held_out),
        }


if __name__ == "__main__":
    sys.exit(main())
