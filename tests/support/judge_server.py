"""A scripted OpenAI-compatible server that plays the judge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentenv.contract.env import Grader
from agentenv.envs.grading.judge import Judge
from agentenv.envs.grading.keys import JudgeConfig
from agentenv.envs.grading.reward import make_grader
from tests.support.listening import listening


class Cut:
    """A reply that never arrives: the connection is closed."""


class JudgeServer:
    """Answers each request with the next reply, and repeats the last one: the message's text, a
    status, a whole body, nothing in time (None), or the result of a function of the messages.
    """

    def __init__(self) -> None:
        self.replies: list[Any] = ["CORRECT"]
        self.num_running = self.most_running = 0
        self.latency_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.reply_headers: dict[str, str] = {}
        self.url = ""
        self.judges: list[Judge] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(30 if reply is None else self.latency_s)
        self.num_running -= 1
        if isinstance(reply, Cut) and request.transport is not None:
            request.transport.close()
        if isinstance(reply, int):
            return web.Response(status=reply, text="busy", headers=self.reply_headers)
        if isinstance(reply, dict):
            return web.json_response(reply)
        text = reply(body["messages"]) if callable(reply) else reply
        return web.json_response({"choices": [{"message": {"content": text}}]})


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    """One on a free port of this machine."""
    scripted = JudgeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", scripted.answer)
    async with listening(app) as url:
        scripted.url = f"{url}/v1"
        yield scripted
        for judge in scripted.judges:
            await judge.close()


def judge_of(server: JudgeServer, **keys: Any) -> Judge:
    """A judge that is closed with the server."""
    judge = Judge(JudgeConfig(url=server.url, model="m", **{"num_retries": 1, **keys}))
    server.judges.append(judge)
    return judge


def grader_of(server: JudgeServer, grader: Mapping[str, Any] = {}, **judge: Any) -> Grader:
    """By these keys of the tables of the grader and of its judge."""
    table = {"url": server.url, "model": "m", **judge}
    return make_grader({"kind": "judge", "math": False, **grader, "judge": table})
