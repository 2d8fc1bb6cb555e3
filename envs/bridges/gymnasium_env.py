"""The environment `agentenv/Gymnasium-v0`: episodes of a Gymnasium environment, in this process.

    [env]
    id = "agentenv/Gymnasium-v0"
    kwargs = { id = "FrozenLake-v1", actions = ["left", "down", "right", "up"] }

    [data]
    train = "gymnasium:FrozenLake-v1"    # a row per seed
    source = { size = 1000, question = "Walk from S to G; H are holes." }

Observations are texts or discrete; others are left out if a method shows the state as text, the
`view` (with `options.render_mode = "ansi"`: "render"). A call of the tool `step` is an action: a
text, or the name of a discrete one. Rewards and ends are the environment's; a turn without a call
ends the episode, too. The environment is trusted code, and steps in a thread.

A fork is a replay of the seeded actions, whose outcomes are compared with the first ones. Before
the first episode, scripted ones are replayed; if one differs, there are no forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import gymnasium
from gymnasium.spaces import Discrete, Text
from msgspec.structs import replace

from agentenv.base.deadline import admitted
from agentenv.base.errors import ConfigError, DataError, EnvError, ToolError
from agentenv.base.offload import OwnThread
from agentenv.base.types import Info, Message, Task, ToolResult
from agentenv.contract.env import ForkMode, Grade, StepResult, shared, tally
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.data.data_files import plain

KEY = "gymnasium"  # in Task.metadata: the arguments of the reset
SIZE, HELD_OUT_SEED = 10_000, 1_000_000_000  # of rows
NUM_SCRIPTED, MAX_SCRIPTED = 4, 16  # episodes, and their actions, that are replayed

T = TypeVar("T")
Json = dict[str, Any]


class Game:
    """An episode. `record` has the arguments of the reset, then the actions, each with its
    outcome: text, reward, terminated, truncated."""

    env: Any = None

    def __init__(self) -> None:
        self.record: list[tuple[Any, str, float, bool, bool]] = []

    def has_ended(self) -> bool:
        return any(self.record[-1][3:])

    def reward(self, start: int = 0) -> float:
        """The sum of rewards from this action on."""
        return sum(reward for _, _, reward, *_ in self.record[start:])


class GymnasiumEnv(ToolEnv):
    """One episode of the environment `id`, or "module:id", made with `options`.

    `actions` are names of discrete actions, or examples of texts, with which replays are measured.
    `view` is a method of the environment that returns a text. An episode with a sum of rewards of
    at least `success` succeeded.
    """

    def __init__(
        self,
        task: Task,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        view: str = "",
        success: float = 1.0,
    ) -> None:
        given = (id, dict(options or {}), [*actions], view)
        self.success, self.acting = success, shared((KEY, repr(given)), lambda: Acting(*given))
        super().__init__(task, [self.acting], num_retries=0)

    async def reset(
        self, *, seed: int | None = None, options: Json | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await super().reset(seed=seed, options=options)
        game, chosen = self._game("reset"), {"seed": seed} | self.task.metadata.get(KEY, {})
        await self.acting.in_thread(self.acting.act, game, chosen)
        text = f"{messages[-1].content}\n\n{game.record[0][1]}"
        return [*messages[:-1], replace(messages[-1], content=text)], info

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; the environment gives the rewards, and may end the episode."""
        game = self._game("step")
        if game.has_ended():
            raise EnvError(f"task {self.task.id}: step after the end of the episode")
        start = len(game.record)
        messages, _, ended, cut, info = await super().step(action)
        if game.has_ended():
            messages, ended, info = [], game.record[-1][3], info | (await self._grade(()))[1]
            cut = not ended
        return messages, game.reward(start), ended, cut, info

    async def judge(
        self, states: Mapping[str, Any], written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Whether the episode succeeded; the steps had the rewards."""
        return Grade(0.0, success=self._game("finish").reward() >= self.success)

    def _game(self, what: str) -> Game:
        states = self._open_states(what)
        if Acting.name not in states:
            raise ConfigError('env.tools: Gymnasium-v0 needs its tool "step"; add it')
        game: Game = states[Acting.name]
        return game


class Acting(StatelessTool):
    """The tool for the actions of all episodes of an environment, which makes and replays them."""

    name, description = "step", ""
    fork_mode: ForkMode = "none"

    def __init__(self, id: str, options: Json, actions: list[str], view: str) -> None:
        self.id, self.options, self.actions, self.view = id, options, actions, view
        self.values: dict[str, int] = {}  # of discrete actions, by name
        self.thread = OwnThread(KEY)  # a single one, for the global random generator
        self.places = asyncio.Semaphore()  # in it

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function in the thread; the wait for others does not count as work."""
        async with admitted(self.places, "the thread of Gymnasium"):
            return await self.thread(function, *arguments)

    async def prepare(self) -> None:
        """Check the environment and its replays. Raises ConfigError."""
        await self.in_thread(self._check)

    def start(self, seed: int | None) -> Game:
        return Game()

    async def call(self, arguments: Json, state: Game) -> ToolResult:
        """Raises ToolError for an action that the environment does not have."""
        written = str(arguments.get("action"))
        action = self.values.get(written.strip().lower(), written)
        if state.has_ended() or not self.space.contains(action):
            problem = "The episode has ended." if state.has_ended() else self.description
            raise ToolError(f"{written!r:.80} cannot be done. {problem}")
        await self.in_thread(self.act, state, action)
        return ToolResult(state.record[-1][1])

    async def fork(self, state: Game) -> Game:
        """Raises EnvError for a replay that differs, after which there are no forks."""
        other = await self.in_thread(self.replayed, state)
        if other.record != state.record:
            self.fork_mode = "none"
            raise EnvError(f"{self.id}: a replay of its actions had another outcome")
        return other

    async def close(self, state: Game | None = None) -> None:
        """Close an episode, or the thread; idempotent."""
        if state is None:
            self.thread.close()
        elif state.env is not None:
            await self.in_thread(state.env.close)
            state.env = None

    def act(self, game: Game, action: Any) -> Game:
        """Take an action of the environment; at first, reset it with these arguments."""
        reward, ends = 0.0, [False, False]
        if game.env is None:
            game.env = gymnasium.make(self.id, disable_env_checker=True, **self.options)
            observation, _ = game.env.reset(**action)
        else:
            observation, reward, *ends, _ = game.env.step(action)
        view = str(game.env.get_wrapper_attr(self.view)()) if self.view else ""
        text = "\n".join(filter(None, (described(plain(observation)), view)))
        game.record.append((action, text, float(reward), bool(ends[0]), bool(ends[1])))
        return game

    def replayed(self, game: Game) -> Game:
        """A game with the same actions."""
        other = Game()
        for action, *_ in game.record:
            self.act(other, action)
        return other

    def _check(self) -> None:
        if self.description:
            return
        try:
            game = self.act(Game(), {"seed": 0})
        except Exception as error:  # of Gymnasium, or of the environment
            problem = f"cannot be made, reset and viewed: {type(error).__name__}: {error}"
            raise ConfigError(f"env.kwargs.id: {self.id!r} {problem}") from error
        self.space, number = game.env.action_space, len({*map(str.lower, self.actions)})
        is_text, text = isinstance(self.space, Text), game.record[0][1]
        is_named = isinstance(self.space, Discrete) and number == self.space.n
        for is_right, problem in (
            ("<Autoreset" not in str(game.env), "id: {!r} resets itself, which hides ends"),
            (text, "view: {!r} has no text; expected a method that returns one"),
            (is_text or is_named, "actions: {!r} has {}; expected Text, or Discrete and names"),
        ):
            if not is_right:
                raise ConfigError("env.kwargs." + problem.format(self.id, self.space))
        game.env.close()
        kind: Json = {"type": "string"}
        if is_named:
            places = enumerate(self.actions, int(self.space.start))
            self.values = {name.lower(): place for place, name in places}
            kind["enum"] = self.actions
        self.schema = {"type": "object", "properties": {"action": kind}, "required": ["action"]}
        with suppress(Exception):  # of an environment that cannot be made twice
            if all(map(self._replays, range(NUM_SCRIPTED))):
                self.fork_mode = "replay"
        problem = "replays differ in episodes of env.kwargs.actions"
        number = int(self.fork_mode == "none")
        tally("gymnasium/num_without_forks").add(number, f"{self.id}: no forks: {problem}")
        self.description = f"Takes an action: {', '.join(self.values) or 'a text'}."

    def _replays(self, seed: int) -> bool:
        """Whether an episode equals its replay, although others acted meanwhile."""
        draw, choices = Random(seed), [*self.values.values()] or self.actions
        game = self.act(Game(), {"seed": seed})
        while not game.has_ended() and len(game.record) <= MAX_SCRIPTED:
            other = self.replayed(game)
            self.act(other, draw.choice(choices))
            other.env.close()
            self.act(game, draw.choice(choices))
        return self.replayed(game).record == game.record


def described(value: Any) -> str:
    """The text of an observation, or of its parts that are texts or discrete; empty without any."""
    if isinstance(value, dict):
        texts = {key: described(one) for key, one in value.items()}
        return "\n".join(f"{key}: {text}" for key, text in texts.items() if text)
    parts = value if isinstance(value, list) else [value]
    return ", ".join(map(str, parts)) if all(isinstance(one, str | int) for one in parts) else ""


def rows(id: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Json]:
    """A row per seed. `options`: size, seed (the first), question. Raises DataError."""
    first = HELD_OUT_SEED if held_out else 0
    keys: Json = {"size": SIZE, "seed": first, "question": f"Play {id}."}
    if unknown := sorted(options.keys() - keys.keys()):
        raise DataError(f"gymnasium:{id}: source has no {unknown}; known: {', '.join(keys)}")
    keys |= options
    for seed in range(keys["seed"], keys["seed"] + keys["size"]):
        row = {"id": f"{id}-{seed}", "question": keys["question"], "kind": id}
        yield {**row, KEY: {"seed": seed}}
