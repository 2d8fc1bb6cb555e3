"""Many environments in one process: a coroutine each, where Gymnasium's vector envs need a
process each.

    async with VectorEnv(make_env, tasks, num_envs=1000) as vector:
        observations, infos = await vector.reset(seed=0)
        while ...:
            observations, rewards, terminated, truncated, infos = await vector.step(actions)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import cycle
from random import Random
from typing import Any, Self, TypeVar

from agentenv.env import Env
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.types import Info, Message, Task

T = TypeVar("T")
Step = tuple[list[Message], float, bool, bool, Info]


class VectorEnv:
    """Steps `num_envs` environments at once; each goes through tasks of its own.

    An environment that ended is reset by the next step, with the next task and whatever its
    action, as in Gymnasium's next-step autoreset. One that fails, or takes over `timeout_s`, ends
    as truncated with info["error"]; the others go on. At most `max_concurrency` environments are
    at work at a time.
    """

    def __init__(
        self,
        make_env: Callable[[Task], Env],
        tasks: Sequence[Task],
        num_envs: int,
        *,
        timeout_s: float = 120.0,
        max_concurrency: int | None = None,
    ) -> None:
        if num_envs < 1 or not tasks:
            raise ConfigError(
                f"VectorEnv: needs at least one env and one task, got {num_envs} and {len(tasks)}"
            )
        self.num_envs = num_envs
        self.timeout_s = timeout_s
        self._make_env = make_env
        self._tasks = tasks
        self._upcoming: Iterator[Task] = cycle(tasks)
        self._envs: list[Env | None] = [None] * num_envs
        self._ended = [True] * num_envs
        self._num_resets = 0
        self._seed: int | None = None
        self._places = asyncio.Semaphore(max_concurrency or num_envs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def reset(self, *, seed: int | None = None) -> tuple[list[list[Message]], list[Info]]:
        """Start all environments, from the first task on; equal seeds give equal episodes."""
        await self.close()
        self._upcoming, self._num_resets, self._seed = cycle(self._tasks), 0, seed
        steps = await self._all(self._restart(place) for place in range(self.num_envs))
        return [step[0] for step in steps], [step[4] for step in steps]

    async def step(
        self, actions: Sequence[Message]
    ) -> tuple[list[list[Message]], list[float], list[bool], list[bool], list[Info]]:
        """One action an environment; lists in the order of the environments."""
        if len(actions) != self.num_envs:
            raise ConfigError(f"VectorEnv.step: {len(actions)} actions for {self.num_envs} envs")
        steps = await self._all(
            self._restart(place) if self._ended[place] else self._step(place, action)
            for place, action in enumerate(actions)
        )
        observations, rewards, terminated, truncated, infos = zip(*steps, strict=True)
        return (
            list(observations),
            list(rewards),
            list(terminated),
            list(truncated),
            list(infos),
        )

    async def close(self) -> None:
        """Close every environment, also after one of them fails to; idempotent."""
        closing = [self._close(place) for place in range(self.num_envs) if self._envs[place]]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    # inner workings

    async def _all(self, steps: Iterable[Coroutine[Any, Any, Step]]) -> list[Step]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(step) for step in steps]
        return [task.result() for task in tasks]

    def _restart(self, place: int) -> Coroutine[Any, Any, Step]:
        """Its task and seed are drawn now, in the order of the environments."""
        task, number = next(self._upcoming), self._num_resets
        self._num_resets += 1
        seed = None if self._seed is None else Random(f"{self._seed}/{number}").getrandbits(31)
        return self._start(place, task, seed)

    async def _start(self, place: int, task: Task, seed: int | None) -> Step:
        try:
            await self._close(place)
            env = self._envs[place] = self._make_env(task)
            messages, info = await self._within(env.reset(seed=seed))
        except AgentEnvError as error:
            return self._failed(place, error)
        self._ended[place] = False
        return messages, 0.0, False, False, info

    async def _step(self, place: int, action: Message) -> Step:
        env = self._envs[place]
        assert env is not None
        try:
            step = await self._within(env.step(action))
        except AgentEnvError as error:
            return self._failed(place, error)
        self._ended[place] = step[2] or step[3]
        return step

    async def _within(self, awaitable: Awaitable[T]) -> T:
        async with self._places:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await awaitable
            except TimeoutError as error:
                raise AgentEnvError(f"no answer within {self.timeout_s:g} s") from error

    def _failed(self, place: int, error: AgentEnvError) -> Step:
        self._ended[place] = True
        return [], 0.0, False, True, {"error": f"{type(error).__name__}: {error}"}

    async def _close(self, place: int) -> None:
        env, self._envs[place] = self._envs[place], None
        self._ended[place] = True
        if env is not None:
            async with asyncio.timeout(self.timeout_s):
                await env.close()
