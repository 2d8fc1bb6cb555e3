"""Demonstrations are played in the environment, and a tool may share the state of another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv import (
    StatelessTool,
    Task,
    ToolEnv,
    ToolResult,
    demonstrate,
    texts_of,
    tiny_model,
    write_rows,
)
from agentenv.adapters.cold_start import tiny_tokenizer
from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import check_model_directory, load_tokenizer, read_model_config
from agentenv.base.types import Message, NextTurn
from agentenv.contract.env import ForkMode, StepResult, close_shared, shared
from agentenv.envs.grading.reward import ExactMatch

NONE: dict[str, Any] = {"type": "object", "properties": {}}
THING: dict[str, Any] = {"type": "object", "properties": {"thing": {"type": "string"}}}


class PutTool:
    """Puts a thing into the bag, which is its state."""

    name, description = "put", "Put it in."
    schema = THING
    fork_mode: ForkMode = "snapshot"

    def start(self, seed: int | None) -> list[str]:
        return []

    async def call(self, arguments: dict[str, Any], state: list[str]) -> ToolResult:
        state.append(arguments["thing"])
        return ToolResult(f"{len(state)} in it")

    async def fork(self, state: list[str]) -> list[str]:
        return list(state)

    async def close(self, state: list[str]) -> None:
        state.clear()


class CountTool(StatelessTool):
    name, description, schema, state_of = "count", "How many are in it.", NONE, "put"

    async def call(self, arguments: dict[str, Any], state: list[str]) -> ToolResult:
        return ToolResult(str(len(state)))


class BagEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, [CountTool(), PutTool()], ExactMatch(), prompt="Be quick.")


ROW = {"question": "Put two in and count.", "answer": 2, "kind": "two", "things": ["a", "b"]}


def solve(task: Task, results: Sequence[str]) -> str:
    things = task.metadata["things"]
    if len(results) < len(things):
        return f"<think>.</think><put>{things[len(results)]}</put>"
    if len(results) == len(things):
        return "<think>.</think><count></count>"
    return f"<think>.</think><answer>{results[-1]}</answer>"


def test_a_row_has_the_messages_and_the_reward_of_its_episode(tmp_path: Path) -> None:
    (row,) = demonstrate(BagEnv, [ROW], solve, stage="clean")
    assert (row["kind"], row["stage"], row["reward"], row["success"]) == ("two", "clean", 1.0, True)
    said = [(one["role"], one["content"]) for one in row["messages"]]
    assert said[:2] == [("system", "Be quick."), ("user", "Put two in and count.")]
    assert [text for role, text in said if role == "tool"] == ["1 in it", "2 in it", "2"]
    assert said[-1] == ("assistant", "<think>.</think><answer>2</answer>")
    assert "2 in it" in texts_of([row])
    path = write_rows(tmp_path / "data" / "sft.jsonl", [row])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row]


def test_an_episode_that_does_not_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"row-1.*100"):
        demonstrate(BagEnv, [ROW], lambda task, results: "<count></count>")


class AlteringEnv(BagEnv):
    """A program that does not return what the policy said."""

    async def step(self, action: Message) -> StepResult:
        *outcome, info = await super().step(action)
        then = NextTurn(prompt=(Message("user", "?"),), kind="altered", cause="text")
        return (*outcome, info | {"turn": then})  # type: ignore[return-value]


def test_a_demonstration_has_one_context() -> None:
    with pytest.raises(DataError, match=r"row-1.*<put>a.*altered/text.*thoughts"):
        demonstrate(AlteringEnv, [ROW], solve)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="answer"):
        demonstrate(BagEnv, [{"question": "?"}], solve)


async def test_shared_tools_keep_the_contract() -> None:
    task = Task("t", "bag", "?", ("2",))
    await check_tool_env(BagEnv, task, ["<put>a</put>", "<count></count>", "<put>b</put>", "2"])


async def test_a_state_that_no_tool_has_is_refused() -> None:
    env = ToolEnv(Task("t", "bag", "?", ("2",)), [CountTool()], ExactMatch())
    with pytest.raises(ConfigError, match=r"'count'.*state_of.*'put'"):
        await env.reset(seed=0)


TEXTS = ["How many Bolts are there?", "<think>look</think><stock>Bolts</stock>", 'So {"a": 3}']


def test_words_are_tokens_and_other_text_is_bytes() -> None:
    tokenizer = tiny_tokenizer(TEXTS, tools=["stock"])

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    words = ["<think>", "look", "</think>", "<stock>", "Bolts", "</stock>"]
    assert pieces("".join(words)) == words
    assert pieces("How many Bolts")[-2:] == [" many ", "Bolts"]
    assert pieces('{"a": 1240}') == ['{"', "a", '": ', "12", "40", "}"]
    for text in ("größer \u2713\n\t", "Nuts and screws, <b>", "\\boxed{7}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(pieces("Nuts")) == 4


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    first, again, other = (
        tiny_model(tmp_path / name, TEXTS, seed, tools=["stock"], max_tokens=256)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    check_model_directory(first)
    assert read_model_config(first)["max_position_embeddings"] == 256
    assert load_tokenizer(first).encode("Bolts") == load_tokenizer(other).encode("Bolts")
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_a_string_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a list"):
        tiny_model(tmp_path, "How many?")


def test_a_missing_extra_is_reported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "import agentenv\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "try:\n    agentenv.tiny_model('m', ['a'])\n"
        "except agentenv.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "requires tokenizers, which" in done.stdout, done.stderr
    assert "pip install" in done.stdout
    assert "[train]" in done.stdout


async def test_demonstrations_are_played_inside_a_running_event_loop() -> None:
    """As in a notebook, whose resources are not closed."""
    kept = shared("mine", lambda: object())
    (row,) = demonstrate(BagEnv, [ROW], solve)
    assert row["success"]
    assert shared("mine", lambda: object()) is kept
    await close_shared()
