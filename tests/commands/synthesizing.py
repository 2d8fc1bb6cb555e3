"""Syntheses with a scripted engine that knows some questions and looks up others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.engines.scripted import ScriptedEngine
from agentenv.launchers import synthesize
from tests.support.json_files import write_rows
from tests.support.warehouse import STOCK

Run = Callable[..., int]
KINDS = {"easy": "bolts", "plain": "nuts", "doubted": "rivets", "hard": "nuts", "twice": "bolts"}
HINT = "I should look."
HINTS = ("hints.phrases=['perhaps']", f"hints.verification=['{HINT}']", "hints.place=uncertain")


def policy(prompt: str, rng: Random) -> str:
    """Answers easy questions directly, plain ones with the tool and doubtful ones only after a
    hint; calls twice for questions marked twice."""
    kind = next(kind for kind in KINDS if f"({kind}" in prompt)
    item, found = KINDS[kind], prompt.rpartition("<result>")[2].split("<")[0].strip()
    if "solves problems" in prompt:  # the language-only prompt
        answer = STOCK[item] if kind == "easy" else rng.randrange(9)
        return f"<think>Some. Perhaps {answer}.</think><answer>{answer}</answer>"
    call = f"</think><stock>{item}</stock>"
    if HINT in prompt and "</result>" not in prompt:
        return f" {rng.randrange(99)}{call}"
    if kind == "doubted" and HINT not in prompt:
        return "<think>never</think><answer>none</answer>"
    if "</result>" not in prompt:
        return f"<think>look {rng.randrange(99)}{call}"
    if kind == "twice" and prompt.count("</result>") == 1:
        return f"<think>again{call}"
    return f"<think>so</think><answer>{'none' if kind == 'hard' else found}</answer>"


def write_questions(path: Path) -> Path:
    """Two questions of each kind, and a duplicate."""
    rows = [
        {
            "question": f"How many {item} are there? ({kind} {n})",
            "answer": STOCK[item],
            "kind": kind,
            "level": n,
        }
        for kind, item in KINDS.items()
        for n in range(2)
    ]
    rows.append({**rows[0], "question": rows[0]["question"].upper().replace("(EASY", "(easy")})
    return write_rows(path, rows)


def arguments_of(warehouse: Path, out: Path, questions: Path) -> list[str]:
    """Of the command, for a synthesis with the scripted engine."""
    return [
        str(warehouse.parent / "model"), "--env", "me/Warehouse-v0", "env.module=my_env",
        "--out", str(out), f"data={questions}", "engine.name=scripted",
        f"engine.script={__name__}:policy", "limits.max_prompt_tokens=640",
        "limits.max_response_tokens=320", "filter.require_box=false", "num_samples=2",
    ]  # fmt: skip


def runner(warehouse: Path, tmp_path: Path, questions: Path) -> Run:
    """Synthesizes into tmp_path/NAME."""

    def synthesized(name: str, *more: str) -> int:
        return synthesize.main([*arguments_of(warehouse, tmp_path / name, questions), *more])

    return synthesized


def count_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[0] counts the turns requested from the engine."""
    count = [0]
    generate = ScriptedEngine.generate

    async def counted(self: ScriptedEngine, *rest: Any, **keys: Any) -> Any:
        count[0] += 1
        return await generate(self, *rest, **keys)

    monkeypatch.setattr(ScriptedEngine, "generate", counted)
    return count


def written(out: Path) -> dict[str, str]:
    names = ("sft.jsonl", "rl.jsonl", "rejected.jsonl", "summary.json", "dataset_info.json")
    return {name: (out / name).read_text() for name in names}
