"""A process that holds environments for a host at the other end of a link.

They share one event loop, as they would in the host: what computes for seconds blocks the others of
this process, and no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from traceback import format_exception

from agentenv.cluster import env_messages as messages
from agentenv.cluster.env_messages import Call, Failed, Gave
from agentenv.cluster.messages import Alive, Figures, Say, pack
from agentenv.deadline import Deadline, ToldClock, working
from agentenv.env import Env, check_finish, check_reset, check_step, shared_stats
from agentenv.errors import AgentEnvError, CrashError, EnvError, guarded
from agentenv.link import Link
from agentenv.types import Task
from agentenv.worker_group import named, serve

LAST_S = 10.0  # for environments to close after the host is gone

logger = logging.getLogger(__name__)


class EnvServer:
    """Makes environments by `make_env` and calls them for the other end. A close is cancelled after
    `timeout_s` seconds of work."""

    def __init__(self, make_env: Callable[[Task], Env], link: Link, timeout_s: float) -> None:
        self._make_env, self._link, self._timeout_s = make_env, link, timeout_s
        self._envs: dict[int, Env] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._of: dict[int, set[asyncio.Task[None]]] = {}  # the calls of an env

    async def serve(self) -> None:
        """Until the other end is gone; then the environments that are left are closed."""
        async with asyncio.TaskGroup() as group:
            await serve(self._link, partial(self._take, group), self._beat)
            for task in self._calls.values():
                task.cancel()
        left, self._envs = self._envs, {}
        try:
            async with asyncio.timeout(LAST_S):
                await asyncio.gather(*(env.close() for env in left.values()))
        except Exception as error:  # of user code, at the end
            logger.warning("an environment did not close: %r", error)

    def say(self, text: str) -> None:
        """Report a sentence to people, through the host."""
        self._link.send(pack(Say(text)))

    def _take(self, group: asyncio.TaskGroup, frame: bytes) -> None:
        asked = messages.read_call(frame)
        if isinstance(asked, messages.Cancel):
            if asked.call in self._calls:
                self._calls[asked.call].cancel()
            return
        concerned = {asked.env, asked.copy if isinstance(asked, messages.Copy) else asked.env}
        before = [task for env in concerned for task in self._of.get(env, ())]
        task = group.create_task(self._answer(asked, before))
        self._calls[asked.call] = task
        for env in concerned:
            self._of.setdefault(env, set()).add(task)
        task.add_done_callback(partial(self._end, asked.call, concerned))

    def _end(self, call: int, concerned: set[int], task: asyncio.Task[None]) -> None:
        del self._calls[call]
        for env in concerned:
            self._of[env].discard(task)
            if not self._of[env]:
                del self._of[env]

    async def _answer(self, asked: Call, before: list[asyncio.Task[None]]) -> None:
        self._link.send(pack(messages.Begun(asked.call)))
        self._link.flush()  # user code may now block the loop
        said: Gave | Failed
        clock = _TellingClock(partial(self._awaits, asked.call))
        try:
            with working(clock):
                try:
                    said = await self._call(asked, before)
                finally:
                    clock.tell = None
        except Exception as error:  # the host raises it
            trace = ""
            if isinstance(error, CrashError):
                trace = "".join(format_exception(error)).rstrip()
            said = Failed(asked.call, *named(error), trace)
        self._link.send(pack(said))
        self._link.flush()

    async def _call(self, asked: Call, before: list[asyncio.Task[None]]) -> Gave:
        if isinstance(asked, messages.Close):
            return await self._close(asked, before)
        if isinstance(asked, messages.Begin):
            return await self._reset(asked)
        env = self._envs.get(asked.env)
        if env is None:
            raise EnvError("called before reset or after close")
        number = asked.call
        match asked:
            case messages.Step():
                given = await guarded(env.step(asked.action), "the environment's step")
                observation, reward, terminated, truncated, info = check_step(given)
                mode = env.fork_mode
                return Gave(number, mode, observation, reward, terminated, truncated, info)
            case messages.End():
                finishing = env.finish(asked.reason, asked.action)
                reward, info = check_finish(await guarded(finishing, "the environment's finish"))
                return Gave(number, env.fork_mode, reward=reward, info=info)
            case messages.Copy():
                copy = await guarded(env.fork(), "the environment's fork")
                self._envs[asked.copy] = copy
                return Gave(number, copy.fork_mode)

    async def _reset(self, asked: messages.Begin) -> Gave:
        env = self._envs.get(asked.env)
        if env is None:
            try:
                env = self._make_env(asked.task)
            except AgentEnvError:
                raise
            except Exception as error:
                raise CrashError(f"making the environment raised {error!r}") from error
            self._envs[asked.env] = env
        resetting = env.reset(seed=asked.seed, options=asked.options)
        observation, info = check_reset(await guarded(resetting, "the environment's reset"))
        return Gave(asked.call, env.fork_mode, observation, info=info)

    async def _close(self, asked: messages.Close, before: list[asyncio.Task[None]]) -> Gave:
        for task in before:
            task.cancel()
        await asyncio.gather(*before, return_exceptions=True)
        env = self._envs.pop(asked.env, None)
        if env is not None:
            with Deadline.after(self._timeout_s, "env.close", EnvError):
                await guarded(env.close(), "the environment's close")
        return Gave(asked.call)

    def _awaits(self, call: int, what: str, stands: bool, lost_s: float) -> None:
        self._link.send(pack(messages.Awaits(call, what, stands, lost_s)))

    def _beat(self) -> bytes:
        return pack(Alive(Figures(num_open_envs=len(self._envs), env=shared_stats())))


class _TellingClock(ToldClock):
    """Reports also what is awaited."""

    def __init__(self, tell: Callable[[str, bool, float], None]) -> None:
        super().__init__(lambda stands, lost_s: tell(self.doing, stands, lost_s))

    def now(self, what: str) -> None:
        changed = what != self.doing
        super().now(what)
        if changed and self.tell is not None:
            self.tell(self._count <= 0, 0.0)
