"""Packages of verifiers as environments, with the package itself, in environments of their own
(sh .ci/verifiers): of the newest release, and of the newest one with `load_environment`."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentenv.adapters.testing import check_tool_env
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError, DataError, EnvError
from agentenv.base.types import Limit, Message, Task, ToolCall, Turn
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import RowsConfig
from agentenv.envs.bridges.verifiers_env import KEY, VerifiersEnv, rows
from agentenv.envs.program import NUM_MEASURED
from agentenv.launchers.serve_env import ServeEnvConfig
from tests.support.begun import begun

ROOT = Path(__file__).resolve().parents[3]
CLASSIC = ROOT / ".venv-verifiers-classic/bin/python"
TASKSETS = ROOT / ".venv-verifiers/bin/python"
DESK = {"python": str(CLASSIC), "folder": str(ROOT / "tests/fixtures/verifiers")}
PARCELS = {"python": str(TASKSETS), "folder": str(ROOT / "examples/verifiers")}
SIZE = 30

real = pytest.mark.verifiers
pytestmark = pytest.mark.usefixtures("services")


@cache
def tasks(name: str, held_out: bool = False) -> list[Task]:
    source = PARCELS if name == "parcels" else DESK
    config = RowsConfig(source={**source, "size": SIZE})
    return load_tasks(f"verifiers:{name}", "e", config, held_out=held_out)


def action(text: str, **calls: dict[str, Any]) -> Message:
    found = tuple(ToolCall(name, arguments) for name, arguments in calls.items())
    return Message("assistant", text, found, turn=Turn("", text, "stop", 1, 1))


async def play(env: VerifiersEnv, *actions: Message) -> list[Any]:
    return [await env.step(action) for action in actions]


def episode(name: str, place: int = 0) -> tuple[Task, list[Message]]:
    """A task, and the turns that get all of its reward."""
    task = tasks(name)[place]
    if name == "dice":
        return task, [action("one"), action("two")]
    if name == "parcels":
        number = task.question.split()[-1][:-1]
        return task, [action(f"Track {number}"), action(f"<answer>{task.answers[0]}</answer>")]
    number = int(task.question.split()[-1][:-1])
    return task, [action("", track={"number": number}), action(task.answers[0])]


@real
@pytest.mark.parametrize("name", ["desk", "parcels"])
def test_training_and_held_out_rows_are_disjoint(name: str) -> None:
    training, held_out = tasks(name), tasks(name, held_out=True)
    assert training
    assert held_out
    assert not {one.question for one in training} & {one.question for one in held_out}
    assert not {one.id for one in training} & {one.id for one in held_out}


@real
@pytest.mark.parametrize("name", ["desk", "parcels"])
async def test_an_episode_has_the_messages_tools_and_rewards_of_the_package(name: str) -> None:
    task, actions = episode(name)
    env = VerifiersEnv(task)
    prompt, info = await env.reset(seed=0)
    assert prompt[-1].content == task.question
    first, last = await play(env, *actions)
    assert not first[2]
    assert task.answers[0] in first[0][0].content
    if name == "desk":
        assert [one.role for one in prompt] == ["system", "user"]
        assert [one["name"] for one in info["tools"]] == ["track"]
        assert first[0][0].role == "tool"
        assert last[1] == 1.5
        assert {"correct", "brief", "track_calls"} <= {*last[4]["parts"]}
    else:
        assert first[0][0].role == "user"
        assert last[4]["parts"] == {"correct": 1.0, "tracked": 1.0}
    assert last[4]["success"]
    await env.close()


@real
@pytest.mark.parametrize("name", ["desk", "parcels"])
async def test_a_cut_episode_is_scored_by_the_package(name: str) -> None:
    task, actions = episode(name)
    for last in (actions[1], None):
        async with begun(VerifiersEnv(task), seed=0) as env:
            await env.step(actions[0])
            reward, info = await env.finish(Limit.TURNS, last)
            assert info["success"] is (last is not None)
            assert (reward >= 1.0) is (last is not None)
            assert (reward, info) == await env.finish(Limit.TURNS, last)


@real
async def test_forks_are_enabled_after_exact_replays() -> None:
    task, actions = episode("desk")
    for number in range(NUM_MEASURED):
        env = VerifiersEnv(task)
        assert env.fork_mode == "none"
        await env.reset(seed=number)
        await play(env, *actions)
        await env.close()
    env = VerifiersEnv(task)
    assert env.fork_mode == "replay"
    await env.reset(seed=0)
    await env.step(actions[0])
    child = await env.fork()
    one, other = await asyncio.gather(child.step(actions[1]), env.step(action("Rome or Oslo")))
    assert one[1] == 1.5
    assert other[1] < 1.5
    await child.close()
    await env.close()


@real
async def test_forks_stay_disabled_without_exact_replays() -> None:
    task, actions = episode("dice")
    for number in range(NUM_MEASURED):
        async with begun(VerifiersEnv(task), seed=number) as env:
            await play(env, *actions)
            assert env.fork_mode == "none"
    stats = env._replays.stats()
    assert stats["program/replays"] >= NUM_MEASURED
    assert stats["program/replays_exact"] == 0


@real
async def test_a_package_keeps_the_contract() -> None:
    task, actions = episode("desk")
    await check_tool_env(VerifiersEnv, task, actions)


@real
async def test_a_dead_process_is_replaced() -> None:
    task, actions = episode("desk")
    async with begun(VerifiersEnv(task), seed=0) as env:
        assert env._server._process is not None
        env._server._process.kill()
        with pytest.raises(EnvError, match="ended with exit"):
            await env.step(actions[0])
    async with begun(VerifiersEnv(task), seed=0) as env:
        *_, last = await play(env, *actions)
        assert last[1] == 1.5


@real
@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("desks", {}, "no package 'desks'.*pip install ..., or set source.folder"),
        ("desk", {"args": {"nummer": 3}}, "nummer"),
        ("desk", {"args": {"groups": True}}, "rewards groups of rollouts"),
    ],
)
def test_a_missing_package_or_a_wrong_argument_is_named_in_the_error(
    name: str, source: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        list(rows(name, {**DESK, **source}, held_out=False))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"nummer": 3}, r"source has the keys size, args, python, folder, not \['nummer'\]"),
        ({"python": "/none/python"}, "loading its rows failed.*python"),
        ({"folder": "/none/folder"}, "/none/folder"),
    ],
)
def test_a_wrong_source_is_named_in_the_error(source: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(rows("desk", source, held_out=False))


def installed(folder: Path, version: str, code: str = "") -> dict[str, str]:
    """A source with such a package `verifiers`."""
    (folder / "verifiers.py").write_text(code)
    info = folder / f"verifiers-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    return {"folder": str(folder), "python": sys.executable}


def test_missing_or_unsupported_verifiers_are_named_in_the_error(tmp_path: Path) -> None:
    source = {"folder": str(tmp_path), "python": sys.executable}
    with pytest.raises(DataError, match=r"source\.python"):
        list(rows("desk", source, held_out=False))
    with pytest.raises(DataError, match=r"9\.1.*0\.1\.11.*0\.4"):
        list(rows("desk", installed(tmp_path, "9.1"), held_out=False))


@pytest.mark.parametrize(
    ("version", "package", "message"),
    [
        ("0.4.0", "import datasets\ndef load_environment(): ...",
         "has load_environment; verifiers is 0.4.0, not <0.4"),
        ("0.3.1", "def load_environment(): return {}['KEY']",
         r"KeyError\('KEY'\) in .*own_env\.py., line 1"),
    ],
)  # fmt: skip
def test_a_package_for_another_release_or_with_a_bug_is_named_in_the_error(
    tmp_path: Path, version: str, package: str, message: str
) -> None:
    loads = (
        "def load_environment(name):\n    import own_env\n    try:\n        own_env."
        "load_environment()\n    except Exception as error:\n        raise RuntimeError(name) "
        "from error\n"
    )
    (tmp_path / "own_env.py").write_text(package)
    with pytest.raises(DataError, match=message):
        list(rows("own-env", installed(tmp_path, version, loads), held_out=False))


OF_RUN = {"model": {"path": "m"}, "algorithm": {"name": "grpo"}, "train": {"num_steps": 1}}
PLACE = {"python": "p", "folder": "f"}
ARGS = {"args": {"split": "train"}}


@pytest.mark.parametrize("kind", [TrainConfig, ServeEnvConfig])
@pytest.mark.parametrize(
    ("train", "path", "own", "source"),
    [
        ("verifiers:desk", "verifiers:desk", {}, {**PLACE, **ARGS}),
        (["verifiers:desk"], ["verifiers:desk"], {}, {**PLACE, **ARGS}),
        ("verifiers:desk", "verifiers:dice", {"size": 3}, {**PLACE, "size": 3}),
        ("verifiers:desk", "verifiers:desk", {"args": {}}, {**PLACE, "args": {}}),
        ("verifiers:desk", "verifiers:desk", {"python": "q"}, {**PLACE, **ARGS, "python": "q"}),
        ("verifiers:desk", "reasoning_gym:chain_sum", {"size": 3}, {"size": 3}),
        ("openenv:desk", "verifiers:desk", {}, {}),
        ("verifiers:desk", "held_out.jsonl", {}, {}),
    ],
)
def test_evaluation_sets_inherit_the_source_of_training(
    kind: type[TrainConfig | ServeEnvConfig],
    train: str | list[str],
    path: str | list[str],
    own: dict[str, Any],
    source: dict[str, Any],
) -> None:
    raw = {
        "env": {"id": "agentenv/Verifiers-v0"},
        "data": {"train": train, "source": {"size": 9, **PLACE, **ARGS}},
        "eval": {"sets": {"a": {"path": path, "source": own}}},
        **(OF_RUN if kind is TrainConfig else {}),
    }
    assert build_config(kind, raw, "test").eval.sets["a"].source == source


def test_a_task_without_a_generated_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        VerifiersEnv(Task("1", "e", "q", ("a",)))


def test_an_environment_is_created_from_its_row() -> None:
    made = {"name": "n", "args": {}, "python": "p", "folder": "f", "row": json.dumps({"idx": 1})}
    env = VerifiersEnv(Task("1", "e", "q", ("a",), metadata={KEY: made}))
    assert env.fork_mode == "none"
