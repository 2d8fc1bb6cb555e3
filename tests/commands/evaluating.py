"""Evaluations of the untrained model with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.engines.scripted import ScriptedEngine
from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate
from tests.support.warehouse import STOCK

Run = Callable[..., int]


def guessing(prompt: str, rng: Random) -> str:
    """A policy that requests a random item, then answers with a number or gives up, so samples
    differ."""
    if "<result>" not in prompt:
        return f"<think>look</think><stock>{rng.choice(list(STOCK))}</stock>"
    return f"<answer>{rng.choice([*STOCK.values(), 'unknown'])}</answer>"


def arguments_of(warehouse: Path, *more: str) -> list[str]:
    """Of the command, for the untrained model with a scripted engine."""
    return [
        str(warehouse.parent / "model"), "--env", "me/Warehouse-v0", "env.module=my_env",
        "engine.name=scripted", f"engine.script={__name__}:guessing",
        "limits.max_prompt_tokens=300", "limits.max_response_tokens=300", *more,
    ]  # fmt: skip


def runner(warehouse: Path, tmp_path: Path) -> Run:
    """Evaluates the untrained model with a scripted engine into tmp_path/NAME."""

    def evaluated(name: str, *more: str, data: bool = True) -> int:
        rows = [f"data={warehouse.parent}/a.jsonl"] if data else []
        out = ("--out", str(tmp_path / name))
        return evaluate.main(arguments_of(warehouse, *out, *rows, *more))

    return evaluated


def first_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of first turns in the order of the requests to the engine."""
    prompts: list[str] = []
    generate = ScriptedEngine.generate

    async def counted(self: ScriptedEngine, prompt_ids: Any, *rest: Any, **keys: Any) -> Any:
        prompt = self.tokenizer.decode(list(prompt_ids))
        if "<result>" not in prompt:
            prompts.append(prompt)
        return await generate(self, prompt_ids, *rest, **keys)

    monkeypatch.setattr(ScriptedEngine, "generate", counted)
    return prompts


def texts(folder: Path) -> dict[Any, str]:
    return {row.key: json.dumps(row.segments) for row in read_rows(folder)}


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())
