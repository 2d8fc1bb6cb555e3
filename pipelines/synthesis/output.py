"""The directory of a synthesis. Every file is made anew from the trajectories by each command.

OUT/trajectories/       an evaluation of the sets NAME.direct, NAME.tools, NAME.hints
OUT/synthesis.json      the hints they were sampled with; others are refused
OUT/sft.jsonl           ShareGPT dialogues, registered as "sft" in dataset_info.json
OUT/rl.jsonl            questions for agentenv train
OUT/rejected.jsonl      questions and trajectories in neither, each with its reason
OUT/summary.json        counts
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from agentenv.config import changes, to_plain
from agentenv.data_files import Row
from agentenv.disk import explain, write_whole
from agentenv.errors import ConfigError
from agentenv.pipelines.config.evaluation import SynthesisPlan
from agentenv.pipelines.run.terminal import Table
from agentenv.pipelines.synthesis.sampling import Dropped
from agentenv.pipelines.synthesis.sorting import REASONS, Class, Judged, Sorted
from agentenv.types import Message, Task

TRAJECTORIES, SETTINGS = "trajectories", "synthesis.json"
SFT, RL, REJECTED, SUMMARY = "sft.jsonl", "rl.jsonl", "rejected.jsonl", "summary.json"
REGISTRY = "dataset_info.json"
DATASET = {
    "sft": {
        "file_name": SFT,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "system"},
    }
}
ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}


def claim(out: Path, plan: SynthesisPlan) -> None:
    """Take or reopen the directory. Raises ConfigError for one that holds something else, or
    trajectories with other hints."""
    path = out / SETTINGS
    hints = None if plan.config.hints is None else to_plain(plan.config.hints)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))["hints"]
            found = list(changes({"hints": before}, {"hints": hints})) if before and hints else []
            if found:
                raise ConfigError(
                    f"{out} holds trajectories with other hints:\n  " + "\n  ".join(found) + "\n"
                    "choose another --out"
                )
            hints = hints or before
        elif found := sorted(entry.name for entry in out.iterdir()):
            raise ConfigError(
                f"{out} is not empty and no synthesis: it holds {found[0]!r}; choose another --out"
            )
        write_whole(path, json.dumps({"hints": hints}, indent=2) + "\n")
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not readable: {error}; choose another --out") from error
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {explain(error, '--out')}") from error


def sft_row(one: Judged, task: Task, prompt: Sequence[Message], set_name: str) -> Row:
    """A dialogue in ShareGPT form, with `prompt` as the policy meets it with tools."""
    system = [message.content for message in prompt if message.role == "system"]
    asked = [
        {"from": ROLES[message.role], "value": message.content}
        for message in prompt
        if message.role != "system"
    ]
    return {
        "conversations": [*asked, {"from": "gpt", "value": one.text}],
        "system": "\n\n".join(system),
        "id": task.id,
        "set": set_name,
        "kind": task.kind,
        "way": one.way,
        "sample": one.row.sample,
        "num_tool_calls": len(one.row.tool_calls),
    }


def rl_row(task: Task, set_name: str, own_env_id: str) -> Row:
    """A question as `agentenv train` reads it, with everything else that its row had. It
    names its environment unless that is `own_env_id`, the one of its set."""
    row = {**task.metadata, "id": task.id, "set": set_name, "kind": task.kind}
    if task.env_id != own_env_id:
        row["env_id"] = task.env_id
    return {"question": task.question, "answer": list(task.answers), **row}


def rejected_rows(found: Iterable[Sorted], dropped: Iterable[Dropped]) -> Iterable[Row]:
    """Questions that were not asked or not finished, and trajectories that are not learned from."""
    for one in dropped:
        yield _question_row(one.set_name, one.task, one.reason, one.detail)
    for one_sorted in found:
        question = one_sorted.question
        if one_sorted.kind == "unfinished":
            yield _question_row(question.set_name, question.task, "unfinished", "see trajectories")
        for judged in one_sorted.rejected:
            name = {"what": "trajectory", "set": question.set_name, "id": question.task.id}
            sampled = {"way": judged.way, "sample": judged.row.sample}
            yield {**name, **sampled, "reason": judged.reason, "detail": judged.detail}


def write_data(
    out: Path,
    sft: Iterable[Row],
    rl: Iterable[Row],
    rejected: Iterable[Row],
    summary: Row,
) -> None:
    """Each file whole or not at all."""
    for name, rows in ((SFT, sft), (RL, rl), (REJECTED, rejected)):
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_whole(out / name, "".join(lines))
    write_whole(out / REGISTRY, json.dumps(DATASET, indent=2) + "\n")
    write_whole(out / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def _question_row(set_name: str, task: Task, reason: str, detail: str) -> Row:
    asked = {"what": "question", "set": set_name, "id": task.id, "question": task.question}
    return {**asked, "reason": reason, "detail": detail}


# Counts of a synthesis: summary.json, and tables in the terminal.

CLASSES: tuple[Class, ...] = get_args(Class)
GOES_TO = {
    "direct": "sft.jsonl",
    "tools": "sft.jsonl",
    "hard": "rl.jsonl",
    "unfinished": "asked again by the same command",
}
NUM_RIGHT = ("neither", "tools_only", "direct_only", "both")


def summarise(plan: SynthesisPlan, found: Sequence[Sorted], dropped: Sequence[Dropped]) -> Row:
    """All counts. Questions add up over classes and reasons, trajectories over SFT and reasons."""
    classes = Counter(one.kind for one in found)
    pairs = Counter((one.question.task.kind, one.kind) for one in found)
    by_kind = {
        kind: {name: pairs[kind, name] for name in CLASSES}
        for kind in sorted({k for k, _ in pairs})
    }
    right = Counter(NUM_RIGHT[2 * one.right[0] + one.right[1]] for one in found)
    learned = Counter(judged.way for one in found for judged in one.chosen)
    trajectories = {}
    for way in plan.ways:
        reasons = Counter(j.reason for one in found for j in one.rejected if j.way == way)
        trajectories[way] = {
            "sft": learned[way],
            "rejected": {reason: reasons[reason] for reason in REASONS if reasons[reason]},
        }
    return {
        "num_questions": len(found) + len(dropped),
        "not_asked": dict(sorted(Counter(one.reason for one in dropped).items())),
        "classes": _counted(classes, CLASSES),
        "by_kind": by_kind,
        "right": _counted(right, NUM_RIGHT),
        "trajectories": trajectories,
        "num_sft": sum(learned.values()),
        "num_rl": classes["hard"],
    }


def class_table(summary: Row) -> Table:
    """Questions by class and kind."""
    kinds = list(summary["by_kind"]) if len(summary["by_kind"]) > 1 else []
    rows = []
    for name in CLASSES:
        counts = [summary["classes"][name], *(summary["by_kind"][kind][name] for kind in kinds)]
        rows.append([name, *map(str, counts), GOES_TO[name]])
    for reason, count in summary["not_asked"].items():
        rows.append([reason, str(count), *("" for _ in kinds), "not asked"])
    columns = ["class", "all", *kinds, "goes to"]
    return Table(title="questions", columns=columns, rows=rows, left=[0, len(columns) - 1])


def reason_table(summary: Row) -> Table:
    """Trajectories by way and reason."""
    ways = summary["trajectories"]
    rows = [["sft", *(str(one["sft"]) for one in ways.values()), "right, clean, drawn"]]
    for reason, why in REASONS.items():
        counts = [one["rejected"].get(reason, 0) for one in ways.values()]
        if any(counts):
            rows.append([reason, *map(str, counts), why])
    columns = ["", *ways, "because"]
    return Table(title="trajectories", columns=columns, rows=rows, left=[0, len(columns) - 1])


def _counted(counts: Counter[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: counts[name] for name in names}
