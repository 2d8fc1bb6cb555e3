"""Gymnasium's environments as ours: its toy texts, and small ones with each fault."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Discrete, Text
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import Autoreset

from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.types import Limit, Message, Task, ToolCall
from agentenv.contract.env import isolated_shared, shared_stats
from agentenv.data.data_files import generated_rows
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import RowsConfig
from agentenv.envs.bridges.gymnasium_env import GymnasiumEnv

LAKE = ["left", "down", "right", "up"]
TOYS: dict[str, list[str]] = {
    "FrozenLake-v1": LAKE,
    "Taxi-v4": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking-v1": ["up", "right", "down", "left"],
    "Blackjack-v1": ["stick", "hit"],
}


class Walk(gymnasium.Env[Any, Any]):
    """Rewards the third step to the right."""

    observation_space, action_space = Text(9), Discrete(2, start=5)
    place: Any = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return "at 0", {}

    def moved(self, by: int) -> int:
        self.place += by
        return int(self.place)

    def step(self, action: Any) -> Any:
        place = self.moved(1 if action == 6 else -1)
        return f"at {place}", float(place == 3), place == 3, False, {}


class Shared(Walk):
    """A deep copy has the state of its original; a fresh one has not."""

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


class Global(Walk):
    """Seeds and draws from the global generator, as several games do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        random.seed(seed)
        return super().reset(seed=seed)

    def moved(self, by: int) -> int:
        return super().moved(random.choice([by, -by]))


class Pixels(Walk):
    observation_space = Box(0, 1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}


class Continuous(Walk):
    action_space = Box(0, 1)


class Spoken(Walk):
    """Takes texts."""

    action_space = Text(9, charset="left right")

    def step(self, action: str) -> Any:
        return super().step(6 if action == "right" else 5)


class Many(VectorEnv[Any, Any, Any]):
    """Several at once."""


for kind in (Walk, Shared, Global, Pixels, Continuous, Spoken, Many):
    gymnasium.register(f"test/{kind.__name__}-v0", kind)
gymnasium.register("test/Again-v0", lambda: Autoreset(Walk()))
gymnasium.register("test/Short-v0", Walk, max_episode_steps=2)
STEPS = ["left", "right"]


@pytest.fixture(autouse=True)
async def _shared() -> AsyncIterator[None]:
    async with isolated_shared():
        yield


def act(action: str) -> Message:
    return Message("assistant", "", (ToolCall("step", {"action": action}),))


def task(seed: int = 0) -> Task:
    return Task("t", "e", "Play.", ("",), metadata={"gymnasium": {"seed": seed}})


def walk(name: str, **keys: Any) -> GymnasiumEnv:
    return GymnasiumEnv(task(), f"test/{name}-v0", **{"actions": STEPS, **keys})


@pytest.mark.parametrize("toy", TOYS)
async def test_toy_texts_are_played_to_their_ends_with_forks(toy: str) -> None:
    def made(one: Task) -> GymnasiumEnv:
        return GymnasiumEnv(one, toy, {"max_episode_steps": 4}, TOYS[toy])

    plain = gymnasium.make(toy, max_episode_steps=4)
    plain.reset(seed=0)
    actions, ended, total = [], False, 0.0
    while not ended:
        actions.append(TOYS[toy][len(actions) % 2])
        _, reward, terminated, truncated, _ = plain.step(TOYS[toy].index(actions[-1]))
        ended, total = terminated or truncated, total + float(reward)
    await check_tool_env(made, task(), [act(one) for one in actions])
    env = made(task())
    await env.reset()
    found = [await env.step(act(one)) for one in actions]
    assert sum(step[1] for step in found) == total
    assert found[-1][2:4] == (terminated, truncated)
    assert env.fork_mode == "snapshot"
    await env.close()


async def test_turns_without_calls_are_actions_and_wrong_ones_are_answered() -> None:
    env = walk("Walk")
    prompt, info = await env.reset()
    assert prompt[-1].content.endswith("\n\nat 0")
    assert info["tools"][0]["parameters"]["properties"]["action"]["enum"] == STEPS
    found, reward, *_ = await env.step(Message("assistant", "<think>on</think> Right "))
    assert (found[0].content, reward) == ("at 1", 0.0)
    for wrong in (Message("assistant", "jump"), act("jump"), act("")):
        assert "left, right" in (await env.step(wrong))[0][0].content
    both = Message("assistant", "", act("right").tool_calls * 3)
    assert (await env.step(both))[1:4] == (1.0, True, False)
    await env.close()


async def test_a_limit_of_the_environment_truncates() -> None:
    env = walk("Short")
    await env.reset()
    await env.step(act("left"))
    assert (await env.step(act("left")))[1:4] == (0.0, False, True)
    assert (await env.finish(Limit.TURNS, None))[1]["success"] is False
    await env.close()


@pytest.mark.parametrize(
    ("name", "keys", "mode"),
    [
        ("Walk", {}, "snapshot"),
        ("Shared", {}, "replay"),
        ("Global", {}, "none"),
        ("Spoken", {}, "snapshot"),
        ("Spoken", {"actions": []}, "none"),
    ],
)
async def test_forks_are_those_that_act_alike(name: str, keys: Any, mode: str) -> None:
    env = walk(name, **keys)
    await env.reset()
    assert env.fork_mode == mode
    assert shared_stats().get("gymnasium/num_without_forks", 0) == (mode == "none")
    if mode != "none":
        await env.step(act("right"))
        other = await env.fork()
        await other.step(act("right"))
        assert (await env.step(act("left")))[0][0].content == "at 0"
        assert (await other.step(act("right")))[1:3] == (1.0, True)
        await other.close()
    await env.close()


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("Again", {}, "id.*resets itself"),
        ("Many", {}, "id"),
        ("Absent", {}, "id"),
        ("Pixels", {}, "view"),
        ("Pixels", {"view": "absent"}, "view"),
        ("Continuous", {}, "id"),
        ("Walk", {"actions": []}, "actions.*2"),
        ("Walk", {"actions": ["on", "ON"]}, "actions"),
        ("Walk", {"options": {"speed": 1}}, "id.*speed"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_its_key(name: str, keys: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.kwargs\.{key}"):
        await walk(name, **keys).reset()


async def test_colors_of_a_terminal_are_named() -> None:
    lake = {"render_mode": "ansi", "is_slippery": False}
    env = GymnasiumEnv(task(), "FrozenLake-v1", lake, LAKE)
    prompt, _ = await env.reset()
    assert "[red S]FFF" in prompt[-1].content
    assert "F[red F]FF" not in prompt[-1].content
    assert "S[red F]FF" in (await env.step(act("right")))[0][0].content
    await env.close()


def test_rows_are_seeds() -> None:
    path, source = "gymnasium:FrozenLake-v1", {"size": 2, "question": "Go."}
    made = load_tasks(path, "e", RowsConfig(source=source))
    assert [one.metadata["gymnasium"]["seed"] for one in made] == [0, 1]
    assert {one.question for one in made} == {"Go."}
    held_out = load_tasks(path, "e", RowsConfig(source=source), held_out=True)
    assert not {one.id for one in made} & {one.id for one in held_out}
    with pytest.raises(DataError, match="sise"):
        [*generated_rows(Path(path), {"sise": 1}, held_out=False)]
