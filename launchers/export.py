"""Writes a Hugging Face directory: `agentenv export CHECKPOINT OUT`.

CHECKPOINT is a checkpoint of a run, or a run, for its last checkpoint. OUT contains weights,
config, tokenizer, chat template and generation_config, for transformers, vLLM and SGLang. `--push
REPO` also sends it to the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.hub import HubRepository
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.run.terminal import View


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="agentenv export",
        description="Export a checkpoint as a Hugging Face directory, without a learner.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--text-only", action="store_true", help="leave out towers, such as vision, and MTP heads"
    )
    parser.add_argument("--push", metavar="REPO", help="send OUT to a new, private hub repository")
    arguments = parser.parse_args(argv)

    def work(view: View) -> None:
        checkpoint = find_checkpoint(arguments.checkpoint)
        repository = HubRepository(arguments.push) if arguments.push else None
        from agentenv.learners.ranks.offline_export import export

        view.wait_for(f"reading {checkpoint}", "writing")
        dtype, alone = arguments.dtype, arguments.text_only
        export(checkpoint, arguments.out, dtype=dtype, text_only=alone)
        view.end()
        part = "the text model of " if alone else ""
        view.log(f"exported {part}{checkpoint} to {arguments.out} as {dtype}")
        if repository is not None:
            view.wait_for(f"sending {arguments.out} to the hub", "the next steps")
            address = repository.push(arguments.out)
            view.end()
            view.log(f"pushed to {address}, which is private")
        path = shlex.quote(str(arguments.out))
        view.suggest(
            {
                f"vllm serve {path}": "serve the model",
                f"agentenv evaluate {path} --env ID data=FILE": "evaluate it",
            }
        )

    return exit_code_of(work, str(arguments.out))
