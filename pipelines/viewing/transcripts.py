"""Trajectories in other formats: `agentenv export transcripts SOURCE OUT`.

SOURCE is a run, for its archived trees, or the directory of an evaluation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentenv.archive import ARCHIVE, Step, read_step, steps_of
from agentenv.disk import naming
from agentenv.errors import DISTRIBUTION, ConfigError, DataError, MissingError, install_hint
from agentenv.failures import Redactor
from agentenv.pipelines.evaluation.store import CONFIG_FILE as EVALUATION_FILE
from agentenv.pipelines.evaluation.store import ROWS_FILE, load_rows, load_saved
from agentenv.pipelines.run.checkpoints import find_checkpoint
from agentenv.pipelines.run.records import Decode
from agentenv.pipelines.run.rundir import CONFIG_FILE
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.run.transcript import Branch, Question, Turn, of_row, of_tree, redacted

logger = logging.getLogger(__name__)

EVALUATIONS = "eval"  # folder of a run
TOKENIZER = "tokenizer.json"


class Part(NamedTuple):
    """The content of a log: a step, or a set of an evaluation."""

    name: str
    questions: list[Question]
    at: datetime
    facts: dict[str, Any]


def export(arguments: argparse.Namespace, view: View) -> None:
    """Write the requested transcripts; `arguments` are those of `agentenv export transcripts`.
    Raises ConfigError, DataError."""
    source, out = arguments.source, arguments.out
    if arguments.format == "inspect" and importlib.util.find_spec("inspect_ai") is None:
        raise MissingError(
            f"--format inspect requires the package inspect_ai: {install_hint('inspect')}"
        )
    is_evaluation = (source / ROWS_FILE).is_file()
    model, parts = (_of_evaluation if is_evaluation else _of_run)(arguments)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; choose another directory")
    num_logs = num_trajectories = 0
    distinct: set[tuple[str, str, str]] = set()  # steps of a run share questions
    for part in parts:
        with naming(out):
            out.mkdir(parents=True, exist_ok=True)
            if arguments.format == "inspect":
                _write_inspect(part, out, model, per_tree=arguments.per == "tree")
            else:
                _write_atif(part, out, model)
        num_logs += 1
        dataset = part.name if is_evaluation else ""
        distinct |= {(dataset, one.task, one.question) for one in part.questions}
        num_trajectories += sum(len(one.branches) for one in part.questions)
    questions = "1 question" if len(distinct) == 1 else f"{len(distinct)} questions"
    done = f"{num_trajectories} trajectories of {questions} written to {out}"
    if arguments.format == "inspect":
        done += f", logs: {num_logs}; view them with `inspect view --log-dir {out}`"
    view.log(done)


def _write_inspect(part: Part, out: Path, model: str, *, per_tree: bool) -> None:
    from agentenv.pipelines.viewing import inspect_log  # slow to load, and an extra

    questions = part.questions if per_tree else inspect_log.by_trajectory(part.questions)
    path = out / f"{part.name}.eval"
    inspect_log.write_log(path, questions, part.name, model, part.at, part.facts)


def _write_atif(part: Part, out: Path, model: str) -> None:
    folder = out / part.name
    folder.mkdir()
    for question in part.questions:
        place = f"{part.facts['run']}/{part.name}/{question.id}"
        for branch in question.branches:
            document = atif_document(question, branch, place, model, part.facts)
            text = json.dumps(document, ensure_ascii=False, allow_nan=False)
            name = f"{question.id}-{branch.name}.json".replace("/", "_")
            (folder / name).write_text(text + "\n", encoding="utf-8")


def _of_run(arguments: argparse.Namespace) -> tuple[str, Iterator[Part]]:
    run = arguments.source
    settings = _settings(run)
    steps = steps_of(run / ARCHIVE)
    if not steps:
        raise DataError(
            f"{run / ARCHIVE} contains no trees: the run has finished no step yet, or "
            "archive.max_gb "
            "is 0" + _evaluations(run)
        )
    if arguments.step is not None and arguments.step not in steps:
        known = f"available: {min(steps)} to {max(steps)}"
        raise DataError(f"{run / ARCHIVE} contains no step {arguments.step}; {known}")
    chosen = [path for step, path in steps.items() if arguments.step in (None, step)]
    decode = _decoder(run, settings)
    redactor = Redactor(settings)
    model = f"agentenv/{run.resolve().name}"

    def parts() -> Iterator[Part]:
        num_found = 0
        for path in chosen:
            try:
                step = read_step(path)
            except DataError as error:
                if arguments.step is not None:
                    raise
                logger.warning("%s; it is skipped", error)
                continue
            found = list(_questions(step, arguments, decode, redactor))
            num_found += len(found)
            if found or arguments.tree is None:
                yield _step_part(run, path, step, found)
        if arguments.tree is not None and not num_found:
            raise DataError(f"{run / ARCHIVE}: no tree {arguments.tree} in these steps")

    return model, parts()


def _step_part(run: Path, path: Path, step: Step, questions: list[Question]) -> Part:
    names = ("step", "policy_version", "incarnation")
    facts = {name: getattr(step.header, name) for name in names}
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    name = f"step-{step.header.step:06d}"
    return Part(name, questions, at, {"run": run.resolve().name, **facts})


def _questions(
    step: Step, arguments: argparse.Namespace, decode: Decode, redactor: Redactor
) -> Iterator[Question]:
    for entry in step.entries:
        if arguments.tree in (None, entry.tree):
            kept = step.tree(entry)
            yield redacted(of_tree(kept, decode, with_tokens=arguments.tokens), redactor)


def _of_evaluation(arguments: argparse.Namespace) -> tuple[str, Iterator[Part]]:
    folder = arguments.source
    for name in ("step", "tree", "tokens"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} is for the trees of a run; {folder} is an evaluation")
    saved = load_saved(folder)
    rows = load_rows(folder)
    redactor = Redactor(saved.config)
    at = datetime.fromtimestamp((folder / ROWS_FILE).stat().st_mtime, UTC)
    subject = str(saved.subject.get("name") or "policy")
    facts = {"run": subject, "evaluation": folder.resolve().name}

    def parts() -> Iterator[Part]:
        for name in dict.fromkeys(row.dataset for row in rows):
            of_set = [redacted(of_row(row), redactor) for row in rows if row.dataset == name]
            # repetitions of a question are epochs of the same sample
            questions = [msgspec.structs.replace(one, id=one.task) for one in of_set]
            if arguments.format == "atif":
                questions = of_set
            yield Part(name, questions, at, {**facts, "set": name})

    return f"agentenv/{Path(subject).name}", parts()


def _settings(run: Path) -> dict[str, Any]:
    path = run / CONFIG_FILE
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{run} is neither the folder of a run nor of an evaluation: {CONFIG_FILE} cannot be "
            f"read: {getattr(error, 'strerror', None) or error}" + _evaluations(run)
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not the configuration of a run")
    return found


def _evaluations(run: Path) -> str:
    within = sorted({path.parent.name for path in (run / EVALUATIONS).glob(f"*/{EVALUATION_FILE}")})
    return f"; evaluations are in {run / EVALUATIONS}: {', '.join(within)}" if within else ""


def _decoder(run: Path, settings: dict[str, Any]) -> Decode:
    """The decoder of the tokenizer in the last checkpoint, or in the initial model."""
    from tokenizers import Tokenizer

    from agentenv.encoder import fast_decoder

    model = str(settings.get("model", {}).get("path", "")).replace("{run}", str(run))
    try:
        folders = [find_checkpoint(run)]
    except DataError:
        folders = []
    for folder in (*folders, Path(model)):
        if (folder / TOKENIZER).is_file():
            return fast_decoder(Tokenizer.from_file(str(folder / TOKENIZER)))
    raise DataError(
        f"{run}: no {TOKENIZER} in a checkpoint of the run or in {model or 'its model'}; copy the "
        "model's there"
    )


# Trajectories as ATIF, the Agent Trajectory Interchange Format of Harbor: a JSON file each. The
# format has a single sequence of steps. A fork is a separate trajectory. Its shared steps are
# marked `is_copied_context`, so that training on all files uses each step once, and
# `extra.forked_from` names trajectory and step. All trajectories of a tree have the same
# `session_id`.

SCHEMA = "ATIF-v1.7"


def atif_document(
    question: Question, branch: Branch, session: str, model: str, source: dict[str, Any]
) -> dict[str, Any]:
    """The document of a trajectory. `session`: identifies the question within the run; `source`:
    facts about the origin."""
    path = question.path(branch)
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": question.prompt}]
    forked_at = 0
    for owner, turn in path:
        copied = owner is not branch
        forked_at = len(steps) + 1 if copied else forked_at
        steps.append(_step(len(steps) + 1, turn, copied=copied))
        if turn.of_user:
            more = {"is_copied_context": True} if copied else {}
            message = {"source": "user", "message": turn.answer, **more}
            steps.append({"step_id": len(steps) + 1, **message})
    names = ("task", "kind", "question", "answers")
    extra = {**source, **{name: getattr(question, name) for name in names}, **question.facts}
    extra["branch"] = branch.name
    if branch.parent is not None:
        parent = f"{session}/{branch.parent}"
        extra["forked_from"] = {"trajectory_id": parent, "step_id": forked_at}
    document = {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": f"{session}/{branch.name}",
        "agent": {"name": "agentenv", "version": _version(), "model_name": model},
        "steps": steps,
        "final_metrics": _final(question, branch, path, len(steps)),
        "extra": extra,
    }
    clean: dict[str, Any] = _without_none(document)
    return clean


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


def _final(
    question: Question, branch: Branch, path: list[tuple[Branch, Turn]], num_steps: int
) -> dict[str, Any]:
    contexts, sampled = ([getattr(turn, name) for _, turn in path] for name in _COUNTS)
    scores = question.scores if len(question.branches) == 1 else {}
    return {
        "total_prompt_tokens": sum(contexts) if None not in contexts else None,
        "total_completion_tokens": sum(sampled) if None not in sampled else None,
        "total_steps": num_steps,
        "extra": {**{name: getattr(branch, name) for name in _ENDED}, **scores, **branch.facts},
    }


_COUNTS = ("num_context", "num_tokens")
_ENDED = ("reward", "success", "end", "limit", "error", "reason")


def _step(step_id: int, turn: Turn, *, copied: bool) -> dict[str, Any]:
    names = [f"{turn.key}-call-{place}" for place in range(1, len(turn.calls) + 1)]
    step: dict[str, Any] = {
        "step_id": step_id,
        "source": "agent",
        "message": turn.text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.num_context,
            "completion_tokens": turn.num_tokens,
            "prompt_token_ids": turn.prompt_ids or None,
            "completion_token_ids": turn.token_ids or None,
            "logprobs": turn.logprobs or None,
        },
        "extra": turn.facts,
    }
    if copied:
        step["is_copied_context"] = True
    if turn.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": name,
                "function_name": str(call["name"]),
                "arguments": call.get("arguments", {}),
                "extra": {key: call[key] for key in ("ok", "error", "duration_s") if key in call},
            }
            for name, call in zip(names, turn.calls, strict=True)
        ]
    if turn.answer and not turn.of_user:
        # the results of a turn's calls are a single text, attributed to the last call
        result = {"source_call_id": names[-1] if names else None, "content": turn.answer}
        step["observation"] = {"results": [result]}
    return step


def _without_none(value: Any) -> Any:
    """The value without keys whose value is None: the format has no null."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value
