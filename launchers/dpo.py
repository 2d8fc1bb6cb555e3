"""Preference training: `agentenv dpo CONFIG [key.sub=value ...] [--resume [WHICH]]`.

Reads pairs of a chosen and a rejected answer and trains on the policy's own tokens in them by
direct preference optimization (learners/ranks/dpo.py). With --self-critic N, CONFIG is a
configuration of `agentenv train` with a table [self_critic], and the policy generates the pairs
itself, in N rounds. See docs/sft.md.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import ConfigError
from agentenv.launchers.command import make_parser, parse, run_command
from agentenv.launchers.sft import next_commands
from agentenv.training.supervised.run import PreferenceTraining, train_supervised


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    parser = make_parser("agentenv dpo", "Train a policy on preferences.", DPORunConfig)
    parser.add_argument(
        "--self-critic",
        type=int,
        metavar="N",
        help="N rounds on the policy's own answers; CONFIG is a configuration of agentenv train",
    )
    arguments = parse(parser, argv)
    if arguments.self_critic is not None and arguments.self_critic < 1:
        parser.error(f"--self-critic {arguments.self_critic}: expected at least one round")
    if arguments.self_critic is None:
        work = partial(train_supervised, PreferenceTraining)
        return run_command(arguments, DPORunConfig, work, "the first step", next_commands)
    rounds = partial(self_critic, arguments.self_critic)
    return run_command(arguments, SelfCriticRunConfig, rounds, "the first round", next_commands)


class SelfCriticRunConfig(TrainConfig, frozen=True, kw_only=True):
    """A training configuration that has the table [self_critic]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.self_critic is None:
            raise ConfigError(
                "self_critic: --self-critic requires the table [self_critic], or one key of it, as "
                "self_critic.num_questions=32"
            )


def self_critic(
    num_rounds: int, config: TrainConfig, run: RunDirectory, view: View, resume: str
) -> Coroutine[Any, Any, None]:
    """The work of --self-critic."""
    from agentenv.training.start import make_training  # slow to load
    from agentenv.training.supervised.self_critic import run_rounds

    return run_rounds(make_training(config, run, view, resume=resume), num_rounds)
