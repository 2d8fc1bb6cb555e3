"""Trains a policy: `python launchers/train.py CONFIG [key.sub=value ...] [--resume [WHICH]]`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agentenv.config import load_config
from agentenv.errors import AgentEnvError, ConfigError, DataError
from launchers.assembly import import_from_working_directory
from launchers.checkpoints import LATEST
from launchers.config import TrainConfig
from launchers.keys import key_table
from launchers.rundir import RunDirectory, explain
from launchers.view import View

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    arguments = _parse(argv)
    import_from_working_directory()
    view = View()
    try:
        config = load_config(TrainConfig, arguments.config, arguments.overrides)
        name = config.run.name or arguments.config.stem
        run = RunDirectory(Path(config.run.dir) / name, resume=bool(arguments.resume))
        view.log_to(run.path / "run.log")
        return asyncio.run(_train(config, run, view, arguments.resume))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        view.fail(f"{error.filename or 'writing the run'}: {explain(error)}")
        return EXIT_FAILED
    except (AgentEnvError, ExceptionGroup) as error:
        reason = first_reason(error)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    finally:
        view.close()


async def _train(config: TrainConfig, run: RunDirectory, view: View, resume: str) -> int:
    from launchers.training import Training

    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await Training(config, run, view, resume=resume).run_all()
    except asyncio.CancelledError:
        view.say("interrupted; the command with --resume goes on from the last checkpoint")
        return EXIT_INTERRUPTED
    return 0


def first_reason(error: BaseException) -> AgentEnvError | OSError | None:
    """The first failure with a reason for the user; None if there is a bug among the errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, AgentEnvError | OSError) else None
    reasons = [first_reason(part) for part in error.exceptions]
    return None if None in reasons else reasons[0]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/train.py",
        description="Train a policy with asynchronous agentic reinforcement learning.",
        epilog=key_table(TrainConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="TOML file, e.g. configs/quickstart.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        default="",
        metavar="latest|best|PATH",
        help="continue a stopped run from a checkpoint, by default its last one",
    )
    arguments = parser.parse_intermixed_args(argv)
    if "=" in arguments.resume and not Path(arguments.resume).exists():
        arguments.overrides.append(arguments.resume)  # --resume key.sub=value
        arguments.resume = LATEST
    return arguments


if __name__ == "__main__":
    sys.exit(main())
