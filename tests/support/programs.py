"""Programs that call the endpoint, coroutines instead of processes, and the environment that turns
their calls into steps: the smallest one that agentenv/endpoint describes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Self

import aiohttp

from agentenv.base.errors import EnvError
from agentenv.base.types import Info, Limit, Message, NextTurn, Task
from agentenv.contract.env import ForkMode, StepResult
from agentenv.endpoint import capture
from tests.support.toy import TOOL

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": TOOL}]


class Client:
    """A client of chat completions, with the variables of a program."""

    def __init__(self, variables: dict[str, str], task: Task) -> None:
        self.task = task
        self.url = variables["OPENAI_BASE_URL"] + "/chat/completions"
        self.headers = {"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
        self.http = aiohttp.ClientSession()

    async def ask(self, messages: list[Json], tools: Any = TOOLS, **more: Any) -> Json:
        """The message of the reply. Raises EnvError for an error."""
        body = {"model": "policy", "messages": messages, "tools": tools, **more}
        async with self.http.post(self.url, json=body, headers=self.headers) as response:
            reply = await response.json()
        if "error" in reply:
            raise EnvError(reply["error"]["message"])
        return dict(reply["choices"][0]["message"])

    async def abandon(self, messages: list[Json], session: capture.CaptureSession) -> None:
        """End the connection of a call while it is sampled, which must take longer than 0.1 s."""
        asking = asyncio.ensure_future(self.ask(messages))
        await asyncio.wait([asking], timeout=0.1)
        assert session.counts["calls"]
        asking.cancel()
        await asyncio.wait([asking])


Program = Callable[[Client], Awaitable[float | None]]


class ProgramEnv:
    """An episode of a program, which returns its reward, None: 1; a fork replays it."""

    fork_mode: ForkMode = "replay"
    last: capture.CaptureSession
    thoughts: capture.Thoughts = "apart"
    refused: capture.Refused = "fail"
    discards = False  # abandoned answers

    def __init__(self, task: Task, program: Program) -> None:
        self.task, self.program = task, program
        self.running: asyncio.Task[float] | None = None

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.endpoint = await capture.shared_endpoint()
        self._begin(self.endpoint.open(thoughts=self.thoughts, refused=self.refused))
        call = await self._next()
        assert call is not None
        return call.messages, {"tools": call.tools, "turn": call.turn}

    async def step(self, action: Message) -> StepResult:
        self.session.reply(action)
        call = await self._next()
        if call is None:
            assert self.running is not None
            gone = self.session.take_lost()
            gone += self.session.take_abandoned() if self.discards else ()
            turn = NextTurn(discards=gone)
            info: Info = {"success": True, "turn": turn, "endpoint": dict(self.session.counts)}
            return [], self.running.result(), True, False, info
        return call.messages, 0.0, False, False, {"turn": call.turn}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return -1.0, {"success": False}

    async def fork(self) -> Self:
        other = type(self)(self.task, self.program)
        other.endpoint = self.endpoint
        other._begin(self.endpoint.open(after=self.session))
        try:
            await other.session.ready()
        except EnvError:
            await other.close()
            raise
        return other

    async def close(self) -> None:
        self.endpoint.forget(self.session)
        if self.running is not None:
            self.running.cancel()
            with contextlib.suppress(asyncio.CancelledError, EnvError):
                await self.running

    def _begin(self, session: capture.CaptureSession) -> None:
        self.session = ProgramEnv.last = session
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> float:
        client = Client(self.session.variables, self.task)
        try:
            reward = await self.program(client)
            return 1.0 if reward is None else reward
        finally:
            await client.http.close()

    async def _next(self) -> capture.ProgramCall | None:
        """The next call; None: the program has ended."""
        assert self.running is not None
        pending = asyncio.create_task(self.session.next())
        await asyncio.wait({pending, self.running}, return_when=asyncio.FIRST_COMPLETED)
        if pending.done():
            return pending.result()
        pending.cancel()
        self.running.result()
        return None
