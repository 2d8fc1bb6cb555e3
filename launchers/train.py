"""Trains a policy: `agentenv train CONFIG [key.sub=value ...] [--resume [WHICH]]`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.launchers.command import make_parser, parse, run_command

if TYPE_CHECKING:
    from agentenv.assembly.run.rundir import RunDirectory
    from agentenv.assembly.run.terminal import View


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    parser = make_parser(
        "agentenv train",
        "Train a policy with asynchronous agentic reinforcement learning.",
        TrainConfig,
        example="configs/quickstart.toml",
    )
    arguments = parse(parser, argv)
    return run_command(arguments, TrainConfig, reinforce, suggest=next_commands)


def next_commands(arguments: argparse.Namespace, run: Path) -> dict[str, str]:
    """Commands to suggest after a run, each with its use."""
    return {
        f"agentenv view {shlex.quote(str(run))}": "curves, trajectories, forks, in the browser",
        f"agentenv evaluate {shlex.quote(str(run))}": "the last checkpoint, in more detail",
        f"agentenv export {shlex.quote(str(run))} DIR": "for transformers and vLLM",
    }


def reinforce(
    config: TrainConfig, run: RunDirectory, view: View, resume: str
) -> Coroutine[Any, Any, None]:
    """Train as configured. The returned coroutine is the whole run."""
    from agentenv.training.loop.control import controlled  # slow to load
    from agentenv.training.start import make_training  # after the errors of the configuration

    return make_training(config, run, view, resume=resume, subscribers=[controlled]).run_all()
