"""The environment `agentenv/Gymnasium-v0`: episodes of a Gymnasium environment, in this process.

    [env]
    id = "agentenv/Gymnasium-v0"
    kwargs = { id = "FrozenLake-v1", actions = ["left", "down", "right", "up"] }

    [data]
    train = "gymnasium:FrozenLake-v1"    # a row per seed
    source = { size = 1000, question = "Walk from S to G; H are holes." }

Observations are texts or discrete; those of another kind are left out if a method shows the state
as text: render with `options.render_mode = "ansi"`, or the `view`. An action is a text, or the name
of a discrete one: a call of the tool `step`, or a turn without a call. Rewards and ends are the
environment's. Steps run in a thread. The environment is trusted code.

Before the first episode, scripted ones are copied in the middle, and the copies compared: deep
copies, else replays of the seeded actions. If both differ, there are no forks.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

import gymnasium
from gymnasium import spaces

from agentenv.base.errors import ConfigError, DataError, ToolError
from agentenv.base.offload import OwnThread
from agentenv.base.types import Task
from agentenv.contract.env import ForkMode, shared, tally
from agentenv.data.data_files import plain
from agentenv.envs.bridges import sessions
from agentenv.envs.bridges.sessions import (
    Json,
    SessionAnswer,
    SessionCall,
    SessionServer,
    SessionTool,
)

ACTION = "action"  # the argument of the tool
MAX_SCRIPTED = 32  # actions of a scripted episode
# a text in a color of a terminal, by the numbers 30 to 37, and 40 to 47 behind the text
COLORED = re.compile(r"\x1b\[(?:\d+;)*[34]([0-7])(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumEnv(sessions.SessionEnv):
    """One episode of the environment `id`, or "module:id", made with `options`.

    `actions` are names of discrete actions, unless the environment has names, or examples of texts,
    with which forks are measured. `view` is a method of the environment that returns a text. An
    action may take `timeout_s` seconds. An episode with a sum of rewards of at least `success`
    succeeded.
    """

    key = "gymnasium"

    def __init__(
        self,
        task: Task,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        view: str = "",
        success: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        given = (id, dict(options or {}), list(actions), view)
        games = shared(("gymnasium", repr(given)), lambda: Games(*given))
        super().__init__(task, games, success, timeout_s)


class Games(SessionServer):
    """Makes, plays and copies episodes of an environment."""

    text_key = ACTION

    def __init__(self, id: str, options: Json, actions: list[str], view: str) -> None:
        super().__init__(id)
        self.options, self.actions, self.view = options, actions, view
        self.numbers: dict[str, int] = {}  # of discrete actions, by name
        self.in_thread = OwnThread("gymnasium")  # a single one, for the global random generator

    def session(self) -> Game:
        return Game(self)

    def close(self) -> None:
        """Stop the thread; idempotent."""
        self.in_thread.close()

    async def describe(self) -> None:
        """Check the environment and its copies."""
        await self.in_thread(self._check)
        kind = {"type": "string", **({"enum": [*self.numbers]} if self.numbers else {})}
        schema = {"type": "object", "properties": {ACTION: kind}, "required": [ACTION]}
        about = f"Takes an action: {self.expected}."
        act = {"name": sessions.STEP, "description": about, "inputSchema": schema}
        self.tools = [SessionTool(self), SessionCall(act)]
        modes: tuple[ForkMode, ...] = ("snapshot", "replay")
        for mode in modes if self.numbers or self.actions else ():
            self.mode = mode
            with suppress(Exception):  # of a copy of somebody's environment
                if all([await self._forks_alike(seed) for seed in range(sessions.NUM_MEASURED)]):
                    return
        why = "neither deep copies nor replays act alike in scripted episodes"
        if self.mode == "none":
            why = "their check needs examples of texts: set env.kwargs.actions"
        self.mode = "none"
        tally("gymnasium/num_without_forks").add(1, f"{self.url}: no forks: {why}")

    def make(self) -> Any:
        """A new environment. Raises ConfigError."""
        try:
            made = gymnasium.make(self.url, disable_env_checker=True, **self.options)
        except Exception as error:  # of Gymnasium, or of the environment
            problem = f"cannot be made: {type(error).__name__}: {error}"
            raise self._wrong("id", f"{problem} (of a package: MODULE:ID)") from error
        if re.search("<Auto_?[Rr]eset", str(made)):  # the names of its wrappers
            raise self._wrong("id", "resets itself, which hides the ends of episodes")
        return made

    def play(self, env: Any, kind: str, data: Json) -> SessionAnswer:
        """The answer to the reset or action."""
        if kind == "reset":
            observation, _ = env.reset(seed=data.get("seed"), options=data.get("options"))
            return SessionAnswer({"text": self._text(env, observation)})
        observation, reward, terminated, truncated, _ = env.step(self.value(data))
        answer = SessionAnswer({"text": self._text(env, observation)}, float(reward))
        answer.done, answer.cut = bool(terminated or truncated), bool(truncated and not terminated)
        return answer

    def value(self, data: Json) -> Any:
        """The action of the environment. Raises ToolError."""
        action = data.get(ACTION)
        if not self.numbers and isinstance(action, str) and self.space.contains(action):
            return action
        name = str(action).strip().lower()
        if name not in self.numbers:
            raise ToolError(f"{action!r:.80} is not an action. Expected: {self.expected}.")
        return self.numbers[name]

    def _check(self) -> None:
        env = self.make()
        try:
            self._name_actions(env)
            if env.render_mode == "ansi":
                self.view = self.view or "render"
            if self.view and not hasattr(env.unwrapped, self.view):
                raise self._wrong("view", f"has no method {self.view!r}")
            self.play(env, "reset", {"seed": 0})
        finally:
            env.close()

    def _name_actions(self, env: Any) -> None:
        """Read the action space. Raises ConfigError."""
        space = self.space = env.action_space
        if isinstance(space, spaces.Text):
            self.expected = f"a text of {space.min_length} to {space.max_length} characters"
            return
        if not isinstance(space, spaces.Discrete):
            raise self._wrong(
                "id", f"has actions of {space}; expected Discrete or Text: use an ActionWrapper"
            )
        own: Any = getattr(env.unwrapped, "actions", None)
        is_enum = isinstance(own, enum.EnumType)
        names = [one.name for one in own][: space.n] if is_enum else []
        names = [name.lower() for name in self.actions or names]
        if len({*names}) != space.n:
            raise self._wrong(
                "actions", f"has {space.n} actions; expected as many different names in their order"
            )
        self.numbers = {name: int(space.start) + place for place, name in enumerate(names)}
        self.expected = ", ".join(names)

    async def _forks_alike(self, seed: int) -> bool:
        """Whether a copy in the middle of a scripted episode acts as the original, although another
        one has acted before."""
        draw, choices = Random(seed), [{ACTION: name} for name in self.numbers or self.actions]
        script, other = (draw.choices(choices, k=MAX_SCRIPTED) for _ in range(2))
        whole, first = self.session(), self.session()
        await whole.begin({"seed": seed})
        half = await whole.act(script) // 2
        await first.begin({"seed": seed})
        await first.act(script[:half])
        disturbing, second = await first.copy(), await first.copy()
        await disturbing.act(other)
        for action in script[half:]:
            await first.act([action])
            await second.act([action])
        for game in (whole, first, disturbing, second):
            await game.close()
        return bool(first.record == second.record)

    def _text(self, env: Any, observation: Any) -> str:
        texts = [self._described(env.observation_space, observation)]
        if self.view:
            owner = env if self.view == "render" else env.unwrapped
            texts.append(str(getattr(owner, self.view)()))
        text = "\n".join(filter(None, texts))
        return COLORED.sub(lambda found: f"[{COLORS[int(found[1])]} {found[2]}]", text)

    def _described(self, space: Any, value: Any) -> str:
        """The text of an observation, or of a part; empty for what only the view shows."""
        if isinstance(space, spaces.Dict):
            parts = {key: self._described(space[key], one) for key, one in value.items()}
            return "\n".join(f"{key}: {text}" for key, text in parts.items() if text)
        if isinstance(space, spaces.Tuple):
            return ", ".join(map(self._described, space, value))
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            return str(plain(value))
        if not (isinstance(value, str) or self.view):
            raise self._wrong(
                "view",
                f"observes {space!r:.60}, neither a text nor discrete; expected the name of a "
                'method that returns a text ("pprint_grid"), options = { render_mode = "ansi" }, '
                "or an ObservationWrapper around it",
            )
        return value if isinstance(value, str) else ""

    def _wrong(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"env.kwargs.{key}: the Gymnasium environment {self.url!r} {problem}")


class Game(sessions.Session):
    """An episode."""

    def __init__(self, server: Games) -> None:
        super().__init__(server)
        self._env: Any = None

    async def begin(self, chosen: Json, waits: bool = True) -> Json:
        self._env = await self.server.in_thread(self.server.make)
        return await self.take(chosen, "reset")

    async def take(self, data: Json, kind: str = "step") -> Json:
        if self._env is None or self.has_ended:
            raise ToolError("The episode has ended.")
        answer: SessionAnswer = await self.server.in_thread(self.server.play, self._env, kind, data)
        self.record.append((kind, data, answer))
        self.has_ended, self.was_cut = answer.done, answer.cut
        return answer.observation

    async def act(self, actions: Sequence[Json]) -> int:
        """Take actions until the end; their number."""
        for number, action in enumerate(actions):
            if self.has_ended:
                return number
            await self.take(action)
        return len(actions)

    async def copy_to(self, other: Game) -> None:
        if self.server.mode == "replay":
            return await other.replay(self.record)
        other._env = await self.server.in_thread(deepcopy, self._env)

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await self.server.in_thread(env.close)


def rows(id: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Json]:
    """A row per seed. `options`: size, seed (the first), question. Raises DataError."""
    keys: Json = {"size": sessions.SIZE, "question": f"Play {id}."}
    keys["seed"] = sessions.HELD_OUT_SEED if held_out else 0
    if unknown := sorted(options.keys() - keys.keys()):
        raise DataError(f"gymnasium:{id}: source has no {unknown}; known: {', '.join(keys)}")
    keys |= options
    for seed in range(keys["seed"], keys["seed"] + keys["size"]):
        row = {"id": f"{id}-{seed}", "question": keys["question"], "kind": id}
        yield {**row, "answer": "one that the game rewards", GymnasiumEnv.key: {"seed": seed}}
