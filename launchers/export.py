"""Writes a Hugging Face directory: `python launchers/export.py CHECKPOINT OUT`.

CHECKPOINT is a checkpoint of a run, or a run, whose last one is taken. transformers, vLLM and
SGLang load OUT: weights, config, tokenizer, chat template and generation_config.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.rundir import BEST, find_checkpoint
from launchers.terminal import View, to_its_end


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    arguments = _parse(argv)
    view = View()

    def work() -> None:
        checkpoint = find_checkpoint(arguments.checkpoint, best=arguments.best)
        from learners.export import export  # slow to load: mistakes are told before

        export(
            checkpoint,
            arguments.out,
            dtype=arguments.dtype,
            max_shard_bytes=int(arguments.max_shard_gb * (1 << 30)),
        )
        view.say(f"{checkpoint} written to {arguments.out} as {arguments.dtype}")

    return to_its_end(work, view, writing=str(arguments.out))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/export.py",
        description="Write a checkpoint as a Hugging Face directory, without a learner.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--best", action="store_true", help=f"of a run: checkpoints/{BEST}")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
