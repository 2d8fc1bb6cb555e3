"""Supervised fine-tuning: `agentenv sft CONFIG [key.sub=value ...] [--resume [WHICH]]`.

Reads dialogues (ShareGPT, messages, Alpaca, LLaMA-Factory's dataset_info.json) and trains on the
policy's own messages in them, with the learner and the renderer of reinforcement learning. Writes a
run directory, from whose checkpoints `agentenv train` can start (model.path). See docs/sft.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from agentenv.launchers.command import make_parser, parse, run_command
from agentenv.learners.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.learner import Metrics
from agentenv.pipelines.config.supervised import SFTLoopConfig, SFTRunConfig
from agentenv.pipelines.supervised.encoding import Example
from agentenv.pipelines.supervised.run import (
    SupervisedAssembly,
    fill_rows,
    score_all,
    train_supervised,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    parser = make_parser("agentenv sft", "Fine-tune a policy on dialogues.", SFTRunConfig)
    work = partial(train_supervised, Imitation.of)
    return run_command(parse(parser, argv), SFTRunConfig, work, "the first step", next_commands)


def next_commands(arguments: argparse.Namespace, run: Path) -> dict[str, str]:
    """Commands to suggest after a run, each with its use."""
    path = shlex.quote(str(run))
    return {
        f"agentenv train CONFIG model.path={path}": "reinforcement learning from this model",
        f"agentenv evaluate {path} --env ID data=FILE": "evaluate it",
        f"agentenv export {path} DIR": "for transformers and vLLM",
    }


@dataclass(frozen=True)
class Imitation:
    """Supervised fine-tuning. A row holds one sequence, or several with packing."""

    learner: DeepSpeedLearner
    examples: Sequence[Example]
    rows: Sequence[Sequence[int]]
    held_out: Sequence[Example]
    name: ClassVar[str] = "sft"
    plotted: ClassVar[tuple[str, ...]] = ("loss",)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @classmethod
    async def of(cls, assembly: SupervisedAssembly) -> Imitation:
        """The training and held-out rows of the configuration."""
        config, loaded = assembly.config, await assembly.rows()
        rows = [[place] for place in range(len(loaded.train))]
        if isinstance(config.loop, SFTLoopConfig) and config.loop.packing:
            lengths = [len(example.token_ids) for example in loaded.train]
            rows = fill_rows(lengths, config.data.max_length, config.run.seed)
        return cls(await assembly.learner(), loaded.train, rows, loaded.eval)

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over all policy tokens of the rows."""
        chosen = [self.examples[place] for row in rows for place in self.rows[row]]
        return await self.learner.imitate([example.encoded() for example in chosen], lr_scale)

    async def measure(self) -> Metrics:
        """On the held-out rows: mean negative log-likelihood per token (nats), share of tokens that
        are the most likely, and share of sequences whose tokens all are."""
        if not self.held_out:
            return {}
        count, exact = 0, 0
        sums = np.zeros(2)
        encoded = (example.encoded() for example in self.held_out)
        for score in await score_all(self.learner, encoded):
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
