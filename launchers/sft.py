"""Supervised fine-tuning: `agentenv sft CONFIG [key.sub=value ...] [--resume [WHICH]]`.

Reads dialogues (ShareGPT, messages, Alpaca, LLaMA-Factory's dataset_info.json) and trains on the
policy's own messages in them, with the learner and the renderer of reinforcement learning. Writes a
run directory, from whose checkpoints `agentenv train` can start (model.path). See docs/sft.md.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agentenv.assembly.keys.supervised import SFTRunConfig
from agentenv.launchers.command import make_parser, parse, run_command
from agentenv.training.supervised.run import ImitationTraining, train_supervised


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    parser = make_parser("agentenv sft", "Fine-tune a policy on dialogues.", SFTRunConfig)
    work = partial(train_supervised, ImitationTraining)
    return run_command(parse(parser, argv), SFTRunConfig, work, "the first step", next_commands)


def next_commands(arguments: argparse.Namespace, run: Path) -> dict[str, str]:
    """Commands to suggest after a run, each with its use."""
    path = shlex.quote(str(run))
    return {
        f"agentenv train CONFIG model.path={path}": "reinforcement learning from this model",
        f"agentenv evaluate {path} --env ID data=FILE": "evaluate it",
        f"agentenv export {path} DIR": "for transformers and vLLM",
    }
