"""Packages of the repository of verifiers, graded by us like by their own client, and a tiny model
that learns one: `make long PARTS=verifiers`.

VERIFIERS names a folder with `classic/environments` (the packages of the release 0.1.14),
`tasksets/environments` (those of 0.4), and the environments `classic/venv` and `tasksets/venv` with
these releases, datasets, reasoning-gym and uv. Rows written here stand for
those of hubs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.types import Message, Task, ToolCall, Turn
from agentenv.contract.env import close_shared
from agentenv.envs.bridges.verifiers_env import KEY, VerifiersEnv

ROOT = Path(__file__).resolve().parents[1]
PLACE = Path(os.environ.get("VERIFIERS", "none"))
OWN = ROOT / "tests/support/verifiers_own.py"
NAMES = ["Ada Lovelace", "Kurt Godel", "Alan Turing", "Emmy Noether", "Paul Erdos", "Sofia Kova"]
WORDS = ("one", "two", "three", "four", "five")
TEXT = ". ".join(f"This is sentence number {word} of it" for word in WORDS)
GSM8K = [{"question": f"What is {n} + {n}?", "answer": f"So.\n#### {2 * n}"} for n in range(12)]
SUMS = [(f"What is {n} + 1?", f"{n + 1}") for n in range(12)]
MATHS = [
    {"question": text, "problem": text, "answer": one, "solution": f"\\boxed{{{one}}}"}
    for text, one in SUMS
]
REVERSED = [{"prompt": f"text number {n}"} for n in range(12)]
HUB: dict[str, tuple[str, list[dict[str, Any]]]] = {  # by owner and name: configuration, rows
    "PrimeIntellect/Reverse-Text-RL": ("default", REVERSED),
    "openai/gsm8k": ("main", GSM8K),
    "chiayewken/competition_math": ("default", MATHS),
    "kalomaze/alphabetic-arxiv-authors-it1": ("default", [{"names": NAMES * 3}] * 12),
    "agentlans/wikipedia-paragraphs": ("default", [{"text": TEXT}] * 12),
}

Row = dict[str, Any]
Turns = list[dict[str, Any]]


def replies(*texts: str) -> Turns:
    return [{"text": text} for text in texts]


def called(tool: str, /, **arguments: Any) -> Turns:
    return [{"text": "", "calls": [{"name": tool, "arguments": arguments}]}]


def most_reversed(row: Row) -> Turns:
    return replies(f"<reversed_text>{row['answer'][:-3]}</reversed_text>")


def two_sorted(row: Row) -> Turns:
    """Two names of each list."""
    tags = ["alphabetical_sorted", *["combined_alphabetical_sorted"] * 2]
    golds = zip(tags, row["info"]["ground_truths"], strict=False)
    return replies(*("\n".join([f"<{tag}>", *gold[:2], f"</{tag}>"]) for tag, gold in golds))


def most_repeated(row: Row) -> Turns:
    return replies(*(answer[4:] for answer in row["info"]["answers"]))


def all_tools(row: Row) -> Turns:
    calls = [{"name": name, "arguments": {"x": 1}} for name in row["info"]["tool_names"]]
    return [{"text": "", "calls": calls}]


def the_sum(row: Row) -> Turns:
    asked = row["prompt"][-1]["content"].rpartition(": ")[2].partition("=")[0]
    terms = asked.replace(" ", "").replace("-", "+-").split("+")
    return replies(f"<answer>{sum(map(int, terms))}</answer>")


def looked_up(row: Row) -> Turns:
    return called("facts_lookup", name=row["name"]) + replies(row["answer"])


def written_down(row: Row) -> Turns:
    return called("scratchpad_roundtrip", word=row["word"]) + replies(row["word"])


GOLF = "```python\nprint(5050)\n```"
GYM = {"gym": "chain_sum", "num_train_examples": 4, "num_eval_examples": 4}
# role of the policy, unless it is `agent`; arguments; turns that get a part of the reward
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Row], Turns]]] = {
    "classic reverse-text": ("", {}, most_reversed),
    "classic gsm8k": ("", {}, lambda row: replies(f"It is \\boxed{{{row['answer']}}}.")),
    "classic doublecheck": ("", {}, lambda row: replies("1?", f"\\boxed{{{row['answer']}}}")),
    "classic alphabet-sort": ("", {}, two_sorted),
    "classic sentence-repeater": ("", {}, most_repeated),
    "classic tool-test": ("", {}, all_tools),
    "classic reasoning-gym-env": ("", GYM, the_sum),
    "tasksets reverse-text": ("", {}, most_reversed),
    "tasksets alphabet-sort": ("", {}, two_sorted),
    "tasksets glossary": ("", {}, looked_up),
    "tasksets scratchpad": ("", {}, written_down),
    "tasksets interception": ("", {}, lambda row: replies("I say DETERMINISTIC_BLOCK.")),
    "tasksets gsm8k": ("", {}, lambda row: replies(f"It is so.\n#### {row['answer']}")),
    "tasksets code-golf": ("golfer", {"attempts": 1}, lambda row: replies(GOLF)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each release, a folder with its packages as modules, and with rows in place of a hub."""
    if not PLACE.is_dir():
        pytest.skip("VERIFIERS names no folder of their packages")
    made = {}
    for line in ("classic", "tasksets"):
        folder = made[line] = tmp_path_factory.mktemp(line)
        for package in (PLACE / line / "environments").iterdir():
            inner = package / package.name
            if inner.is_dir():
                shutil.copytree(inner, folder / package.name)
            elif package.is_dir():
                for file in package.glob("*.py"):
                    shutil.copy(file, folder)
        for name, (config, given) in HUB.items():
            (folder / name).mkdir(parents=True)
            lines = "".join(json.dumps(row) + "\n" for row in given)
            for split in ("train", "test"):
                (folder / name / f"{split}.jsonl").write_text(lines)
            (folder / name / "README.md").write_text(
                f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
                "  - split: train\n    path: train.jsonl\n"
                "  - split: test\n    path: test.jsonl\n---\n"
            )
    return made


async def played(task: Task, turns: Turns) -> tuple[float, dict[str, float]]:
    env = VerifiersEnv(task)
    try:
        await env.reset(seed=0)
        for turn in turns:
            text = turn["text"]
            calls = tuple(ToolCall(one["name"], one["arguments"]) for one in turn.get("calls", ()))
            action = Message("assistant", text, calls, turn=Turn("", text, "stop", 1, 1))
            _, reward, terminated, _, info = await env.step(action)
            if terminated:
                return reward, info["parts"]
        raise AssertionError("it goes on after the last turn")
    finally:
        await env.close()
        await close_shared()


@pytest.mark.parametrize("case", CASES)
def test_a_package_is_graded_like_by_its_own_client(case: str, folders: dict[str, Path]) -> None:
    (line, name), (role, args, turns_of) = case.split(), CASES[case]
    python, folder = str(PLACE / line / "venv/bin/python"), str(folders[line])
    asked = {"name": name, "folder": folder, "args": args, "role": role}
    path = f"{PLACE / line / 'venv/bin'}:{os.environ['PATH']}"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    environment = {**os.environ, "PATH": path}
    with subprocess.Popen([python, OWN], env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        text = process.stdout.readline()
        turns = turns_of(json.loads(text))
        process.stdin.write(json.dumps(turns) + "\n")
        made = {"name": name, "args": args, "python": python, "folder": folder, "row": text}
        task = Task("1", "e", "what?", ("that",), metadata={KEY: made})
        reward, metrics = asyncio.run(played(task, turns))
        own = json.loads(process.stdout.readline())
    assert reward == own["reward"]
    for found in (metrics, own["metrics"]):
        found.pop("latency", None)  # a time
    assert metrics == own["metrics"]
    assert reward, "turns that earn nothing show little"


def test_the_example_learns(tmp_path: Path) -> None:
    if not PLACE.is_dir():
        pytest.skip("VERIFIERS names no folder of their packages")
    python = PLACE / "tasksets/venv/bin/python"
    command = [sys.executable, "-m", "agentenv.launchers", "train", "examples/verifiers/train.toml"]
    keys = [f"run.dir={tmp_path}", f"data.source.python={python}"]
    keys += [f"eval.sets.heldout.source.python={python}"]
    subprocess.run([*command, *keys], cwd=ROOT, check=True, capture_output=True)
    success = json.loads((tmp_path / "verifiers" / "summary.json").read_text())["success"]
    assert success["after_rl"] > success["after_sft"]
