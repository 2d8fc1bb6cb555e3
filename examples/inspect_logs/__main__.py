"""Trajectories as logs of Inspect: `python -m examples.inspect_logs SOURCE OUT [--step N]`.

SOURCE is a run, for its archived trees, or the directory of an evaluation.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentenv.assembly.reports.records import Decode
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import naming
from agentenv.base.errors import ConfigError, DataError, MissingError
from agentenv.base.secrets import SECRETS
from agentenv.evaluation.store import CONFIG_FILE as EVALUATION_FILE
from agentenv.evaluation.store import ROWS_FILE, load_rows, load_run_config, load_saved
from agentenv.lab.viewing.folder import tokenizers_of
from agentenv.rollout.archive import ARCHIVE, steps_of
from agentenv.rollout.archive_reader import Step, read_step
from examples.inspect_logs.transcript import TranscriptQuestion, of_row, of_tree

logger = logging.getLogger(__name__)

INSTALL = "pip install 'inspect_ai>=0.3.280'"
EVALUATIONS = "eval"  # folder of a run


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.inspect_logs",
        description="Export the archived trees of a run, or the rows of an evaluation, as logs "
        "of Inspect. Secrets are removed.",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run, or the directory of an evaluation"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory, empty or new")
    parser.add_argument("--step", type=int, metavar="N", help="for a run: only this step, from 1")
    arguments = parser.parse_args(argv)

    def work(view: View) -> None:
        view.wait_for(f"reading {arguments.source}", "writing")
        export(arguments.source, arguments.out, arguments.step, view)
        view.end()
        path = shlex.quote(str(arguments.out))
        view.suggest({f"inspect view --log-dir {path}": "in the viewer of Inspect"})

    return exit_code_of(work, str(arguments.out))


class LogPart(NamedTuple):
    """The content of a log: a step, or a set of an evaluation."""

    name: str
    questions: list[TranscriptQuestion]
    at: datetime
    facts: dict[str, Any]


def export(source: Path, out: Path, step: int | None, view: View) -> None:
    """Write the transcripts of a run, or only of one step, or of an evaluation. Raises ConfigError,
    DataError."""
    is_evaluation = (source / ROWS_FILE).is_file()
    model, parts = (_of_evaluation if is_evaluation else _of_run)(source, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose another directory")
    if importlib.util.find_spec("inspect_ai") is None:
        raise MissingError(f"the package inspect_ai is missing: {INSTALL}")
    from examples.inspect_logs import logs

    num_logs = num_trajectories = 0
    for part in parts:
        with naming(out):
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{part.name}.eval"
            logs.write_log(path, part.questions, part.name, model, part.at, part.facts)
        num_logs += 1
        num_trajectories += sum(len(one.branches) for one in part.questions)
    view.log(f"{num_trajectories} trajectories written to {out}, logs: {num_logs}")


def _of_run(run: Path, only: int | None) -> tuple[str, Iterator[LogPart]]:
    load_run_config(run)  # which names secrets
    steps = steps_of(run / ARCHIVE)
    if not steps:
        raise DataError(
            f"{run / ARCHIVE} contains no trees: the run has finished no step yet, or "
            "archive.max_gb is 0" + _evaluations(run)
        )
    if only is not None and only not in steps:
        known = f"available: {min(steps)} to {max(steps)}"
        raise DataError(f"{run / ARCHIVE} contains no step {only}; {known}")
    chosen = [path for step, path in steps.items() if only in (None, step)]
    decode = _decoder(run)
    model = f"agentenv/{run.resolve().name}"

    def parts() -> Iterator[LogPart]:
        for path in chosen:
            try:
                step = read_step(path)
            except DataError as error:
                if only is not None:
                    raise
                logger.warning("%s; it is skipped", error)
                continue
            trees = (step.tree(entry) for entry in step.entries)
            found = [SECRETS.tree(of_tree(kept, decode)) for kept in trees]
            yield _step_part(run, path, step, found)

    return model, parts()


def _step_part(run: Path, path: Path, step: Step, questions: list[TranscriptQuestion]) -> LogPart:
    names = ("step", "policy_version", "incarnation")
    facts = {name: getattr(step.header, name) for name in names}
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    name = f"step-{step.header.step:06d}"
    return LogPart(name, questions, at, {"run": run.resolve().name, **facts})


def _of_evaluation(folder: Path, step: int | None) -> tuple[str, Iterator[LogPart]]:
    if step is not None:
        raise ConfigError(f"--step is for the trees of a run; {folder} is an evaluation")
    saved = load_saved(folder)
    rows = load_rows(folder)
    at = datetime.fromtimestamp((folder / ROWS_FILE).stat().st_mtime, UTC)
    subject = str(saved.subject.get("name") or "policy")
    facts = {"run": subject, "evaluation": folder.resolve().name}

    def parts() -> Iterator[LogPart]:
        for name in dict.fromkeys(row.dataset for row in rows):
            of_set = [SECRETS.tree(of_row(row)) for row in rows if row.dataset == name]
            # repetitions of a question are epochs of the same sample
            questions = [msgspec.structs.replace(one, id=one.task) for one in of_set]
            yield LogPart(name, questions, at, {**facts, "set": name})

    return f"agentenv/{Path(subject).name}", parts()


def _evaluations(run: Path) -> str:
    within = sorted({path.parent.name for path in (run / EVALUATIONS).glob(f"*/{EVALUATION_FILE}")})
    return f"; evaluations are in {run / EVALUATIONS}: {', '.join(within)}" if within else ""


def _decoder(run: Path) -> Decode:
    """The decoder of the run's tokenizer."""
    from tokenizers import Tokenizer

    from agentenv.text.encoder import fast_decoder

    file = next(filter(Path.is_file, tokenizers_of(run)), None)
    if file is None:
        raise DataError(
            f"{run}: no tokenizer.json in a checkpoint of the run or in its model; copy the "
            "model's there"
        )
    return fast_decoder(Tokenizer.from_file(str(file)))


if __name__ == "__main__":
    sys.exit(main())
