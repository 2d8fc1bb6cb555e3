"""Questions by difficulty, and their data sets (Tool-Star, arXiv 2505.16410, section 3.1).

    answered without tools                 -> SFT, the language-only trajectory
    not so, but with tools or with hints   -> SFT, the trajectory with tools
    neither                                -> RL

"Answered" means by a trajectory that is correct and passes the filters. An unanswered question with
failed trajectories is left for the next command.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import FilterConfig, SynthesisPlan, Way
from agentenv.assembly.reports.records import FAILED, EvalRow
from agentenv.assembly.run.tables import Table
from agentenv.base.config import changes, to_plain
from agentenv.base.disk import write_whole
from agentenv.base.disk_errors import explain
from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task
from agentenv.data.data_files import Row
from agentenv.envs.grading.verdict import last_boxed
from agentenv.text.call_syntax import THOUGHT_OPEN

# Trajectories as training text: unified tags, checked for pairs and order.
#
#     (<think>..</think>)+ with calls <TOOL>..</TOOL><result>..</result> between them, then
#     <answer>..</answer> and nothing more
#
# Text of the policy and results of tools are distinguished by their author, never by their tags, so
# tags in a web page are never structure (as they are in the published format rule).

ALIASES = dict.fromkeys(("thinking", "thought", "reasoning"), "think")
ALIASES |= dict.fromkeys(("final_answer", "final answer"), "answer")
OURS = ("think", "answer", "result")

Part = tuple[bool, str]  # whether the policy wrote it, and its text
Problem = tuple[str, str]  # reason ("" without a problem), and detail


def parts_of(row: EvalRow, tools: Sequence[str]) -> list[Part]:
    """The trajectory after its prompt: text of the policy with unified tags, including a <think>
    from the prompt, and results without their tags."""
    if not row.segments:
        return []
    first = row.segments[0].get("env", "")
    parts = [
        (True, unify_tags(one["policy"], tools))
        if "policy" in one
        else (False, one["env"].strip().removeprefix("<result>").removesuffix("</result>").strip())
        for one in row.segments[1:]
    ]
    if parts and parts[0][0] and first.rstrip().endswith(THOUGHT_OPEN):
        parts[0] = (True, f"{THOUGHT_OPEN}\n{parts[0][1]}")
    return parts


def chain_text(parts: Sequence[Part]) -> str:
    """The trajectory as a single turn:
    <think>..<search>..</search><result>..</result>..<answer>.."""
    texts = [text if by_policy else f"<result>\n{text}\n</result>" for by_policy, text in parts]
    return "".join(texts).strip()


def unify_tags(text: str, tools: Sequence[str]) -> str:
    """The text with uniform tags: < Think >, <THINKING> and </ thought> become the protocol's."""
    pattern, names = _spellings(tuple(tools))
    return pattern.sub(lambda tag: f"<{tag[1]}{names[tag[2].casefold()]}>", text)


def check_chain(parts: Sequence[Part], tools: Sequence[str], *, require_box: bool) -> Problem:
    """The first problem with tags, checked in this order: unpaired_tag, wrong_order, no_thought,
    no_answer, no_box."""
    opened, called, seen = "", False, set[str]()
    for by_policy, tag in _tags(parts, tools):
        name = tag.strip("</>")
        if not by_policy:
            if opened:
                return "unpaired_tag", f"a result is within <{opened}>"
            if not called:
                return "wrong_order", "a result without a call"
            called = False
        elif name == "result":
            return "wrong_order", f"the policy wrote {tag} itself"
        elif tag.startswith("</"):
            if opened != name:
                return "unpaired_tag", f"{tag} closes {f'<{opened}>' if opened else 'nothing'}"
            opened, called = "", name in tools
        elif opened:
            return "unpaired_tag", f"{tag} is within <{opened}>"
        elif called:
            return "wrong_order", f"{tag} is in place of a result"
        elif "answer" in seen:
            return "wrong_order", f"{tag} follows the answer"
        else:
            opened = name
            seen.add(name)
    if opened:
        return "unpaired_tag", f"<{opened}> is not closed"
    if called:
        return "wrong_order", "a call without a result"
    if "think" not in seen:
        return "no_thought", "no <think>"
    if "answer" not in seen:
        return "no_answer", "no <answer>"
    last = parts[-1][1]
    if last.rpartition("</answer>")[2].strip():
        return "wrong_order", "text after the answer"
    if require_box and last_boxed(last.rpartition("<answer>")[2]) is None:
        return "no_box", "the answer has no balanced \\boxed{}"
    return "", ""


def call_keys(row: EvalRow) -> list[str]:
    """The identity of each call of a trajectory: tool and arguments, blanks and case aside."""
    encoder = msgspec.json.Encoder(order="sorted", enc_hook=str)
    calls = ([call.get("name"), _plain(call.get("arguments"))] for call in row.tool_calls)
    return [encoder.encode(call).decode() for call in calls]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def _tags(parts: Sequence[Part], tools: Sequence[str]) -> Iterator[tuple[bool, str]]:
    pattern, _ = _spellings(tuple(tools))
    for by_policy, text in parts:
        if by_policy:
            yield from ((True, tag[0]) for tag in pattern.finditer(text))
        else:
            yield False, "<result>"


@cache
def _spellings(tools: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern for a tag in any spelling, and the protocol's name by the case-folded one."""
    names = {**ALIASES, **{name.casefold(): name for name in (*OURS, *tools)}}
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"<\s*(/?)\s*({either})\s*>", re.IGNORECASE), names


# The trajectories suitable for training, and the reasons against the others.

# reasons why a trajectory is not in the SFT set, in the order of the checks
REASONS = {
    "failed": "infrastructure failure; the same command samples it again",
    "truncated": "truncated by a limit",
    "wrong": "by the environment's grader",
    "unpaired_tag": "a tag that is not opened, not closed, or nested",
    "wrong_order": "a call without its result, a result that no tool gave, or text after the end",
    "no_thought": "no <think>",
    "no_answer": "no <answer>",
    "no_box": "no \\boxed{} in the answer",
    "no_tool_call": "with tools, but without a call",
    "too_many_calls": "over filter.max_tool_calls",
    "repeated_call": "a repeated call",
    "duplicate": "another trajectory of the question has the same text",
    "answered_directly": "with tools, for a question that needs none",
    "surplus": "correct and clean, but another one was drawn",
}


class Judged(Struct, frozen=True):
    """A trajectory, its text, and the reason against it; "" if it is correct and clean."""

    way: Way
    row: EvalRow
    text: str
    reason: str = ""
    detail: str = ""


def judge(row: EvalRow, way: Way, tools: Sequence[str], config: FilterConfig) -> Judged:
    """Check a single trajectory. `tools`: names of the environment's tools."""
    parts = parts_of(row, tools)
    reason, detail = _problem(row, way, parts, tools, config)
    return Judged(way, row, chain_text(parts), reason, detail)


def without_duplicates(judged: Iterable[Judged]) -> list[Judged]:
    """The trajectories of one question; of clean ones with the same text, only the first stays
    clean."""
    seen: dict[str, EvalRow] = {}
    result = []
    for one in judged:
        first = one.row if one.reason else seen.setdefault(one.text, one.row)
        if first is not one.row:
            one = replace(one, reason="duplicate", detail=f"as {first.dataset} {first.sample}")
        result.append(one)
    return result


def _problem(
    row: EvalRow, way: Way, parts: Sequence[Part], tools: Sequence[str], config: FilterConfig
) -> tuple[str, str]:
    """(reason, detail) why a row is rejected; empty if it is not."""
    if row.end == FAILED:
        return "failed", row.error or ""
    if row.end != "terminated":
        return "truncated", row.limit or ""
    if not row.success:
        return "wrong", row.prediction[:200]
    problem = check_chain(parts, tools, require_box=config.require_box)
    if problem[0]:
        return problem
    calls = row.tool_calls
    if way != "direct" and not calls:
        return "no_tool_call", ""
    if len(calls) > config.max_tool_calls:
        return "too_many_calls", f"{len(calls)} calls"
    keys = call_keys(row)
    twice = [key for place, key in enumerate(keys) if key in keys[:place]]
    return ("repeated_call", twice[0][:200]) if twice else ("", "")


Class = Literal["direct", "tools", "hard", "unfinished"]


class Sorted(Struct, frozen=True):
    """A question of a set: its class, its trajectories for training, and the others with
    reasons."""

    set_name: str
    task: Task
    kind: Class
    chosen: list[Judged]
    rejected: list[Judged]


def sort_question(
    set_name: str,
    task: Task,
    judged: Iterable[Judged],
    config: FilterConfig,
    seed: int,
    *,
    is_whole: bool = True,
) -> Sorted:
    """Classify a question; each trajectory is either in `chosen` or in `rejected`. `is_whole`: none
    is missing. The choice is random and not by length, so that the data has the policy's own
    lengths."""
    found = without_duplicates(judged)
    clean = [one for one in found if not one.reason]
    rejected = [one for one in found if one.reason]
    direct = [one for one in clean if one.way == "direct"]
    if not clean:
        failed = not is_whole or any(one.reason == "failed" for one in found)
        return Sorted(set_name, task, "unfinished" if failed else "hard", [], rejected)
    order = direct or list(clean)
    Random(f"{seed}/{set_name}/{task.id}").shuffle(order)
    chosen = order[: config.max_per_question]
    rejected += [replace(one, reason="surplus") for one in order[config.max_per_question :]]
    if direct:
        easy = (one for one in clean if one.way != "direct")
        rejected += [replace(one, reason="answered_directly") for one in easy]
    return Sorted(set_name, task, "direct" if direct else "tools", chosen, rejected)


# The directory of a synthesis. Each command writes all files anew from the trajectories.
#
#     OUT/trajectories/       an evaluation of the sets NAME.direct, NAME.tools, NAME.hints
#     OUT/synthesis.json      the hints of the samples; different hints are rejected
#     OUT/sft.jsonl           ShareGPT dialogues, registered as "sft" in dataset_info.json
#     OUT/rl.jsonl            questions for agentenv train
#     OUT/rejected.jsonl      questions and trajectories in neither, each with its reason
#     OUT/summary.json        counts

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


class Dropped(Struct, frozen=True):
    """A question that is not sampled, and the reason: duplicate, excluded, prompt_too_long."""

    set_name: str
    task: Task
    reason: str
    detail: str = ""


def claim(out: Path, plan: SynthesisPlan) -> None:
    """Create or reopen the directory. Raises ConfigError if it contains something else, or
    trajectories with different hints."""
    path = out / SETTINGS
    hints = None if plan.config.hints is None else to_plain(plan.config.hints)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))["hints"]
            found = list(changes({"hints": before}, {"hints": hints})) if before and hints else []
            if found:
                raise ConfigError(
                    f"{out} contains trajectories with different "
                    "hints:\n  " + "\n  ".join(found) + "\n"
                    "choose another --out"
                )
            hints = hints or before
        elif found := sorted(entry.name for entry in out.iterdir()):
            raise ConfigError(
                f"{out} is not empty and not a synthesis: it contains {found[0]!r}; choose another "
                "--out"
            )
        write_whole(path, json.dumps({"hints": hints}, indent=2) + "\n")
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not readable: {error}; choose another --out") from error
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {explain(error, '--out')}") from error


def sft_row(one: Judged, task: Task, prompt: Sequence[Message], set_name: str) -> Row:
    """A dialogue in ShareGPT format; `prompt`: the prompt with tools."""
    system = [message.content for message in prompt if message.role == "system"]
    first = [
        {"from": ROLES[message.role], "value": message.content}
        for message in prompt
        if message.role != "system"
    ]
    return {
        "conversations": [*first, {"from": "gpt", "value": one.text}],
        "system": "\n\n".join(system), "id": task.id, "set": set_name, "kind": task.kind,
        "way": one.way, "sample": one.row.sample, "num_tool_calls": len(one.row.tool_calls),
    }  # fmt: skip


def rl_row(task: Task, set_name: str, own_env_id: str) -> Row:
    """A question in the format of `agentenv train`, with all other columns of its row. It includes
    its environment unless that is `own_env_id`, that of its set."""
    row = {**task.metadata, "id": task.id, "set": set_name, "kind": task.kind}
    if task.env_id != own_env_id:
        row["env_id"] = task.env_id
    return {"question": task.question, "answer": list(task.answers), **row}


def rejected_rows(found: Iterable[Sorted], dropped: Iterable[Dropped]) -> Iterable[Row]:
    """Rows of dropped and unfinished questions, and of rejected trajectories."""
    for one in dropped:
        yield _question_row(one.set_name, one.task, one.reason, one.detail)
    for one_sorted in found:
        set_name, task = one_sorted.set_name, one_sorted.task
        if one_sorted.kind == "unfinished":
            yield _question_row(set_name, task, "unfinished", "see trajectories")
        for judged in one_sorted.rejected:
            name = {"what": "trajectory", "set": set_name, "id": task.id}
            sampled = {"way": judged.way, "sample": judged.row.sample}
            yield {**name, **sampled, "reason": judged.reason, "detail": judged.detail}


def write_data(
    out: Path, sft: Iterable[Row], rl: Iterable[Row], rejected: Iterable[Row], summary: Row
) -> None:
    """Write all files, each atomically."""
    for name, rows in ((SFT, sft), (RL, rl), (REJECTED, rejected)):
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_whole(out / name, "".join(lines))
    write_whole(out / REGISTRY, json.dumps(DATASET, indent=2) + "\n")
    write_whole(out / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


def _question_row(set_name: str, task: Task, reason: str, detail: str) -> Row:
    question = {"what": "question", "set": set_name, "id": task.id, "question": task.question}
    return {**question, "reason": reason, "detail": detail}


# Counts of a synthesis: summary.json, and tables in the terminal.

CLASSES: tuple[Class, ...] = get_args(Class)
GOES_TO = {
    "direct": "sft.jsonl",
    "tools": "sft.jsonl",
    "hard": "rl.jsonl",
    "unfinished": "retried by the same command",
}


def summarize(plan: SynthesisPlan, found: Sequence[Sorted], dropped: Sequence[Dropped]) -> Row:
    """All counts. Questions sum over classes and reasons, trajectories over SFT and reasons."""
    classes = Counter(one.kind for one in found)
    pairs = Counter((one.task.kind, one.kind) for one in found)
    by_kind = {
        kind: {name: pairs[kind, name] for name in CLASSES}
        for kind in sorted({k for k, _ in pairs})
    }
    chosen = Counter(judged.way for one in found for judged in one.chosen)
    trajectories = {}
    for way in plan.ways:
        reasons = Counter(j.reason for one in found for j in one.rejected if j.way == way)
        trajectories[way] = {
            "sft": chosen[way],
            "rejected": {reason: reasons[reason] for reason in REASONS if reasons[reason]},
        }
    return {
        "num_questions": len(found) + len(dropped),
        "not_asked": dict(sorted(Counter(one.reason for one in dropped).items())),
        "classes": {name: classes[name] for name in CLASSES},
        "by_kind": by_kind,
        "trajectories": trajectories,
        "num_sft": sum(chosen.values()),
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
