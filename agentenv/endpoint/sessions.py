"""Episodes of environments by session id, for servers of environments.

    sessions = Sessions(make_env, most=4096, idle_s=3600.0, timeout_s=600.0)
    (session,) = sessions.add(1)
    messages, info = await sessions.begin(session, task, seed=3)
    copies = await sessions.fork(session, 4)
    messages, reward, terminated, truncated, info = await sessions.step(session, action)
    await sessions.end(session, *copies)

Failures raise Refused, whose code names the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from uuid import uuid4

from agentenv.base.crashes import guarded
from agentenv.base.deadline import uncancelled
from agentenv.base.errors import AgentEnvError
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.contract.env import Env, StepResult, check_finish, check_reset, check_step
from agentenv.endpoint.messages import ApiError

# invalid: the request is invalid; unknown: not supported; full: no session is left; ended: no
# episode is running; made: an environment cannot be made; lost: an environment failed, which ends
# its session
Code = Literal["invalid", "unknown", "full", "ended", "made", "lost"]

logger = logging.getLogger(__name__)


class SessionRefused(ApiError):
    """The error that answers a request."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__("invalid", text)
        self.code = code


class ServeSession:
    """One episode at a time. Each call holds its lock. `is_attached`: it ends with its connection,
    and is not subject to the idle limit."""

    def __init__(self) -> None:
        self.id = str(uuid4())
        self.env: Env | None = None
        self.task: Task | None = None
        self.num_steps = 0
        self.has_ended = self.is_attached = False
        self.lock = asyncio.Lock()

    def live(self) -> Env:
        """The environment of the running episode."""
        if self.env is None or self.has_ended:
            why = "the episode has ended" if self.has_ended else "call reset first"
            raise SessionRefused("ended", why)
        return self.env


class Sessions:
    """At most `most` sessions. One without a connection ends after `idle_s` idle seconds; an answer
    of an environment may take `timeout_s` seconds at most."""

    def __init__(
        self, make_env: Callable[[Task], Env], most: int, idle_s: float, timeout_s: float
    ) -> None:
        self._make_env = make_env
        self.most, self.idle_s, self._timeout_s = most, idle_s, timeout_s
        self._held: dict[str, ServeSession] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def found(self, id: object) -> ServeSession:
        """The session of this id."""
        if (session := self._held.get(str(id))) is None:
            raise SessionRefused("invalid", f"Unknown session_id: {id}")
        return session

    def add(self, number: int) -> list[ServeSession]:
        """Add `number` new sessions. Raises Refused if there is no room for all."""
        if len(self._held) + number > self.most:
            raise SessionRefused("full", f"{len(self._held)} of {self.most} sessions are open")
        made = [ServeSession() for _ in range(number)]
        self._held |= {one.id: one for one in made}
        for one in made:
            asyncio.get_running_loop().call_later(self.idle_s, self._expire, one)
        return made

    async def begin(
        self, session: ServeSession, task: Task, seed: int | None
    ) -> tuple[list[Message], Info]:
        """Begin an episode, which replaces the session's last one."""
        await self._close(session)
        session.has_ended, session.task, session.num_steps = False, task, 0
        try:
            session.env = self._make_env(task)
        except AgentEnvError as error:
            raise SessionRefused("made", str(error)) from error
        return check_reset(await self._within(session.env.reset(seed=seed), "reset"))

    async def step(self, session: ServeSession, action: Message) -> StepResult:
        """Take a turn."""
        taken = check_step(await self._within(session.live().step(action), "step"))
        session.num_steps += 1
        session.has_ended = taken[2] or taken[3]
        return taken

    async def finish(
        self, session: ServeSession, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """Grade an episode that a limit of the policy ended."""
        return check_finish(await self._within(session.live().finish(limit, action), "grade"))

    async def fork(self, session: ServeSession, number: int) -> list[ServeSession]:
        """Create `number` sessions with the state of this one: an equal next action gives an equal
        observation in each, and they are independent. Raises Refused if it cannot create all."""
        env = session.live()
        if env.fork_mode == "none":
            raise SessionRefused("unknown", "this environment cannot be forked")
        made = self.add(number)  # reserve the sessions first
        try:
            for one in made:
                one.env = await self._within(env.fork(), "fork")
                one.task, one.num_steps = session.task, session.num_steps
        except BaseException:
            await uncancelled(self.end(*made))
            raise
        return made

    async def end(self, *sessions: ServeSession) -> None:
        """Close sessions. Idempotent."""
        for session in sessions:
            self._held.pop(session.id, None)
        await asyncio.gather(*map(self._close, sessions))

    async def close(self) -> None:
        """Close all sessions."""
        await self.end(*self._held.values())

    def _expire(self, session: ServeSession) -> None:
        if session.id in self._held and not session.is_attached:
            ending = asyncio.ensure_future(self.end(session))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _close(self, session: ServeSession) -> None:
        env, session.env = session.env, None
        try:
            if env is not None:
                await self._within(env.close(), "end")
        except SessionRefused as error:
            logger.warning("closing a session failed: %s", error)

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await guarded(work, f"the environment's {what}")
        except TimeoutError as error:
            raise SessionRefused("lost", f"no {what} within {self._timeout_s:g} s") from error
        except AgentEnvError as error:
            raise SessionRefused("lost", str(error)) from error
