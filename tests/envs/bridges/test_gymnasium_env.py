"""Gymnasium's environments as ours: its toy texts, and small ones with each fault."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.wrappers import Autoreset

from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError, DataError, EnvError
from agentenv.base.types import Limit, Message, Task, ToolCall
from agentenv.contract.env import shared_stats
from agentenv.contract.tool_env import grades_state
from agentenv.data.data_files import generated_rows
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import RowsConfig
from agentenv.envs.bridges.gymnasium_env import GymnasiumEnv

pytestmark = pytest.mark.usefixtures("services")
TOYS = {
    "FrozenLake-v1": "left down right up",
    "Taxi-v4": "south north east west pickup dropoff",
    "CliffWalking-v1": "up right down left",
    "Blackjack-v1": "stick hit",
}


class Walk(gymnasium.Env[Any, Any]):
    """Rewards the third step to the right."""

    observation_space, action_space = Text(9), Discrete(2, start=5)
    place: Any = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return "at 0", {}

    def step(self, action: Any) -> Any:
        self.place += 1 if action in (6, "right") else -1
        return f"at {self.place}", float(self.place == 3), self.place == 3, False, {}


class Spoken(Walk):
    """Takes texts."""

    action_space = Text(9, charset="left right")


class Global(Walk):
    """Seeds and draws from the global generator, as several games do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        random.seed(seed)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        return super().step(random.choice([5, 6]))


class Shared(Walk):
    """All episodes have one place."""

    def step(self, action: Any) -> Any:
        outcome = super().step(action)
        type(self).place = self.place
        del self.place
        return outcome


class Pixels(Walk):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return Box(0, 1).sample(), {}


class Slow(Walk):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        sleep(0.5 * (seed == 9))
        return super().reset(seed=seed)


class Continuous(Walk):
    action_space = Box(0, 1)


for kind in (Walk, Spoken, Global, Shared, Pixels, Slow, Continuous):
    gymnasium.register(f"test/{kind.__name__}-v0", kind)
gymnasium.register("test/Again-v0", lambda: Autoreset(Walk()))
gymnasium.register("test/Short-v0", Walk, max_episode_steps=2)
gymnasium.register("test/Many-v0", vector_entry_point=Walk)


def act(*actions: str) -> Message:
    return Message("assistant", "", tuple(ToolCall("step", {"action": one}) for one in actions))


async def test_an_episode_closes_after_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All share a thread; the wait for it is no failure."""
    monkeypatch.setattr("agentenv.contract.tool_env.CLOSE_TIMEOUT_S", 0.2)
    one, other = walk("Slow"), walk("Slow", task=task(9))
    await one.reset()
    async with asyncio.TaskGroup() as group:
        group.create_task(other.reset())
        await asyncio.sleep(0.1)
        await one.close()
    await other.close()


def task(seed: int = 0) -> Task:
    return Task("t", "e", "Play.", ("",), metadata={"gymnasium": {"seed": seed}})


def walk(name: str, **keys: Any) -> GymnasiumEnv:
    given = {"task": task(), "actions": ["left", "right"], **keys}
    return GymnasiumEnv(id=f"test/{name}-v0", **given)


@pytest.mark.parametrize("toy", TOYS)
async def test_toy_texts_are_played_to_their_ends_with_forks(toy: str) -> None:
    names, plain = TOYS[toy].split(), gymnasium.make(toy, max_episode_steps=4)
    plain.reset(seed=0)
    actions: list[int] = []
    total, ends = 0.0, [False, False]
    while not any(ends):
        actions.append(len(actions) % 2)
        _, reward, *ends, _ = plain.step(actions[-1])
        total += float(reward)

    def made(one: Task) -> GymnasiumEnv:
        return GymnasiumEnv(one, toy, {"max_episode_steps": 4}, names)

    script = [act(names[one]) for one in actions]
    await check_tool_env(made, task(), script)
    env = made(task())
    await env.reset()
    found = [await env.step(one) for one in script]
    assert (sum(step[1] for step in found), [*found[-1][2:4]]) == (total, ends)
    assert env.fork_mode == "replay"
    await env.close()


@pytest.mark.parametrize("name", ["Walk", "Spoken"])
async def test_actions_have_names_or_are_texts(name: str) -> None:
    env = walk(name)
    prompt, info = await env.reset()
    assert prompt[-1].content.endswith("\n\nat 0")
    names = info["tools"][0]["parameters"]["properties"]["action"].get("enum")
    assert names == (["left", "right"] if name == "Walk" else None)
    assert "cannot" in (await env.step(act("jump")))[0][0].content
    other = await env.fork()
    messages, *rest, _ = await env.step(act("right", "left"))
    assert ([one.content for one in messages], rest) == (["at 1", "at 0"], [0.0, False, False])
    outcome = await other.step(act(*["right"] * 4))
    assert outcome[:4] == ([], 1.0, True, False)
    assert outcome[4]["success"]
    with pytest.raises(EnvError, match="after the end"):
        await other.step(act("right"))
    for one in (env, other):
        await one.close()


async def test_a_limit_of_the_environment_truncates() -> None:
    env = walk("Short")
    await env.reset()
    assert (await env.step(act("left", "left")))[1:4] == (0.0, False, True)
    assert (await env.finish(Limit.TURNS, None))[1]["success"] is False
    await env.close()


@pytest.mark.parametrize(
    ("name", "keys"), [("Global", {}), ("Shared", {}), ("Spoken", {"actions": []})]
)
async def test_there_are_no_forks_where_replays_differ_or_are_unknown(
    name: str, keys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = walk(name, **keys)
    await env.reset()
    assert (env.fork_mode, shared_stats()["gymnasium/num_without_forks"]) == ("none", 1)
    assert name in caplog.text
    await env.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("Again", {}, "id.*resets itself"), ("Many", {}, "id"), ("Absent", {}, "id"),
        ("Walk", {"options": {"speed": 1}}, "id.*speed"), ("Pixels", {}, "view"),
        ("Pixels", {"view": "absent"}, "id.*absent"), ("Continuous", {}, "actions.*Box"),
        ("Walk", {"actions": ["on", "ON"]}, "actions"),
    ],
)  # fmt: skip
async def test_an_environment_that_cannot_be_played_is_refused(
    name: str, keys: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"env\.kwargs\.{problem}"):
        await walk(name, **keys).reset()


async def test_a_view_shows_the_state() -> None:
    env = walk("Pixels", view="__repr__")
    assert "Pixels-v0" in (await env.reset())[0][-1].content
    await env.close()


def test_rows_are_seeds() -> None:
    path, rows = "gymnasium:FrozenLake-v1", RowsConfig(source={"size": 2, "question": "Go."})
    name = "agentenv/Gymnasium-v0"
    made, held_out = (load_tasks(path, name, rows, held_out=one) for one in (False, True))
    assert grades_state(partial(GymnasiumEnv, id="FrozenLake-v1"))
    assert [one.metadata["gymnasium"]["seed"] for one in made] == [0, 1]
    assert {one.question for one in made} == {"Go."}
    assert not {one.id for one in made} & {one.id for one in held_out}
    with pytest.raises(DataError, match="sise"):
        [*generated_rows(Path(path), {"sise": 1}, held_out=False)]
