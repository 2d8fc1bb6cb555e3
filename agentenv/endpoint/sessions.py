"""Episodes of environments by session id, for servers of environments.

    sessions = Sessions(make_env, most=4096, idle_s=3600.0, timeout_s=600.0)
    (session,) = sessions.add(1)
    messages, info = await sessions.begin(session, task, seed=3)
    copies = await sessions.fork(session, 4)
    messages, reward, terminated, truncated, info = await sessions.step(session, action)
    await sessions.end(session, *copies)

What cannot be done raises Refused, whose code says whose fault it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from uuid import uuid4

from agentenv.deadline import uncancelled
from agentenv.env import Env, StepResult, check_finish, check_reset, check_step
from agentenv.errors import AgentEnvError, guarded
from agentenv.types import Info, Limit, Message, Task

# invalid: the request; unknown: there is nothing that does it; full: no session is left; ended:
# there is no episode to act in; made: an environment cannot be made; lost: one has failed, and its
# session with it
Code = Literal["invalid", "unknown", "full", "ended", "made", "lost"]

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is answered by an error."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """One episode at a time. Whoever asks it something holds its lock; `is_attached`: it ends with
    a connection, and is not idle."""

    def __init__(self) -> None:
        self.id = str(uuid4())
        self.env: Env | None = None
        self.task: Task | None = None
        self.num_steps = 0
        self.has_ended = self.is_attached = False
        self.lock = asyncio.Lock()

    def live(self) -> Env:
        """The environment of an episode that goes on."""
        if self.env is None or self.has_ended:
            why = "the episode has ended" if self.has_ended else "call reset first"
            raise Refused("ended", why)
        return self.env


class Sessions:
    """At most `most` sessions. One that nothing is attached to ends after `idle_s`; no answer of an
    environment may take over `timeout_s`."""

    def __init__(
        self, make_env: Callable[[Task], Env], most: int, idle_s: float, timeout_s: float
    ) -> None:
        self._make_env = make_env
        self.most, self.idle_s, self._timeout_s = most, idle_s, timeout_s
        self._held: dict[str, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def found(self, id: object) -> Session:
        """The session of this id."""
        if (session := self._held.get(str(id))) is None:
            raise Refused("invalid", f"Unknown session_id: {id}")
        return session

    def add(self, number: int) -> list[Session]:
        """So many new sessions, or none."""
        if len(self._held) + number > self.most:
            raise Refused("full", f"{len(self._held)} of {self.most} sessions are open")
        made = [Session() for _ in range(number)]
        self._held |= {one.id: one for one in made}
        for one in made:
            asyncio.get_running_loop().call_later(self.idle_s, self._expire, one)
        return made

    async def begin(
        self, session: Session, task: Task, seed: int | None
    ) -> tuple[list[Message], Info]:
        """Begin an episode, in place of the session's last one."""
        await self._close(session)
        session.has_ended, session.task, session.num_steps = False, task, 0
        try:
            session.env = self._make_env(task)
        except AgentEnvError as error:
            raise Refused("made", str(error)) from error
        return check_reset(await self._within(session.env.reset(seed=seed), "reset"))

    async def step(self, session: Session, action: Message) -> StepResult:
        """Take a turn."""
        taken = check_step(await self._within(session.live().step(action), "step"))
        session.num_steps += 1
        session.has_ended = taken[2] or taken[3]
        return taken

    async def finish(
        self, session: Session, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """Grade an episode that a limit of the policy has ended."""
        return check_finish(await self._within(session.live().finish(limit, action), "grade"))

    async def fork(self, session: Session, number: int) -> list[Session]:
        """So many sessions in the state of this one, or none: the same next action gives each the
        same observation, and what one does never changes another."""
        env = session.live()
        if env.fork_mode == "none":
            raise Refused("unknown", "this environment cannot be forked")
        made = self.add(number)  # places first, before others take them
        try:
            for one in made:
                one.env = await self._within(env.fork(), "fork")
                one.task, one.num_steps = session.task, session.num_steps
        except BaseException:
            await uncancelled(self.end(*made))
            raise
        return made

    async def end(self, *sessions: Session) -> None:
        """Close sessions. Idempotent."""
        for session in sessions:
            self._held.pop(session.id, None)
        await asyncio.gather(*map(self._close, sessions))

    async def close(self) -> None:
        """Close all sessions."""
        await self.end(*self._held.values())

    def _expire(self, session: Session) -> None:
        if session.id in self._held and not session.is_attached:
            ending = asyncio.ensure_future(self.end(session))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _close(self, session: Session) -> None:
        env, session.env = session.env, None
        try:
            if env is not None:
                await self._within(env.close(), "end")
        except Refused as error:
            logger.warning("closing a session failed: %s", error)

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await guarded(work, f"the environment's {what}")
        except TimeoutError as error:
            raise Refused("lost", f"no {what} within {self._timeout_s:g} s") from error
        except AgentEnvError as error:
            raise Refused("lost", str(error)) from error
