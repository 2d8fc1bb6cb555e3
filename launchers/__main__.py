"""The console script: `agentenv COMMAND ...`, also `python -m agentenv.launchers COMMAND ...`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from agentenv.base.disk import undecodable
from agentenv.base.installation import DISTRIBUTION
from agentenv.base.registry import not_one_of
from agentenv.base.secrets import seal_output

COMMANDS = {
    "new": "create a project with a custom environment, ready to train",
    "train": "train a policy with asynchronous agentic reinforcement learning",
    "sweep": "train several arms on several seeds",
    "compare": "compare the arms of a sweep, runs, or two evaluations",
    "evaluate": "evaluate a run, a checkpoint, a model directory, or an endpoint by its URL",
    "view": "show a run or an evaluation in the browser",
    "ctl": "control a running training: state, pause, checkpoint",
    "sft": "fine-tune a policy on dialogues",
    "dpo": "train a policy on preferences",
    "synthesize": "generate data for sft and train from questions",
    "export": "export a checkpoint as a Hugging Face directory",
    "serve": "serve a policy, or models such as a judge",
    "serve-env": "serve an environment over the OpenEnv protocol",
    "retriever": "serve a corpus over HTTP",
    "doctor": "check a machine, a configuration, or the rewards of a run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns its exit code: 2 if it is unknown,
    or an argument is not UTF-8."""
    given = list(sys.argv[1:] if argv is None else argv)
    seal_output()
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    if name == "--version":
        sys.stdout.write(f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"agentenv: error: command: {not_one_of(name, [*COMMANDS])}\n")
        return 2
    # Python reads other bytes as lone surrogates, which logs, JSON and TOML cannot represent.
    if shown := next(filter(None, map(undecodable, given)), ""):
        hint = "rename the file or folder, or pass a link to it"
        sys.stderr.write(f"agentenv: error: '{shown}' is not valid UTF-8; {hint}\n")
        return 2
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes
    code: int = importlib.import_module(f"agentenv.launchers.{name.replace('-', '_')}").main(
        given[1:]
    )
    return code


def usage() -> str:
    """The help text: the commands, each with its purpose."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        ["usage: agentenv COMMAND [arguments]", "", *lines, "", "agentenv COMMAND --help", ""]
    )


if __name__ == "__main__":
    sys.exit(main())
