"""OpenEnv from both ends: the server offers an environment of ours, and the client plays it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web

from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError, DataError, EnvError, InfraError, ToolError
from agentenv.base.types import Limit, Message, Task, ToolCall, ToolResult
from agentenv.contract.env import Grade
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.data.data_files import generated_rows
from agentenv.endpoint.openenv import EnvServer
from agentenv.envs.bridges.openenv import OpenEnv
from tests.support.fork_law import check_fork_law
from tests.support.listening import listening

pytestmark = pytest.mark.usefixtures("services")
TASKS = [Task(f"t{number}", "counter", f"Count to {number}.", (str(number),)) for number in (3, 4)]


class Counter(StatelessTool):
    """Adds to a number that begins at the seed."""

    name, description = "add", "Adds a number."
    schema: ClassVar[Any] = {"type": "object", "properties": {"number": {"type": "integer"}}}

    def start(self, seed: int | None) -> list[int]:
        return [(seed or 0) % 10]

    async def call(self, arguments: dict[str, Any], state: list[int]) -> ToolResult:
        if "number" not in arguments:
            raise ToolError("add: number is missing")
        state[0] += arguments["number"]
        return ToolResult(str(state[0]))

    async def fork(self, state: list[int]) -> list[int]:
        return list(state)


class RightAnswer:
    async def grade(self, task: Task, written: Any, calls: Any) -> Grade:
        right = bool(written) and written[-1].content == task.answers[0]
        return Grade(float(right), right, {"calls": float(calls["add"])})


class CounterEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, [Counter()], RightAnswer(), prompt="You count.")


def add(number: int) -> Message:
    return Message("assistant", f"<add>{number}</add>", (ToolCall("add", {"number": number}),))


EPISODE = [add(1), add(2), Message("assistant", "3")]


@asynccontextmanager
async def served(
    make_env: Callable[[Task], Any] = CounterEnv, **settings: Any
) -> AsyncIterator[tuple[EnvServer, str]]:
    server = EnvServer("Counter", make_env, {"train": TASKS, "test": TASKS[:1]}, **settings)
    await server.start()
    try:
        yield server, f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


def task(**chosen: Any) -> Task:
    chosen = chosen or {"split": "train", "index": 0}
    return Task("t", "agentenv/OpenEnv-v0", "?", ("",), metadata={"openenv": chosen})


async def test_a_served_environment_keeps_the_contract() -> None:
    async with served() as (_, url):
        await check_tool_env(lambda one: OpenEnv(one, url), task(), EPISODE)


async def test_a_served_environment_answers_as_the_original() -> None:
    async with served() as (_, url):
        here, there = CounterEnv(TASKS[0]), OpenEnv(task(), url)
        assert await there.reset(seed=7) == await here.reset(seed=7)
        for action in EPISODE:
            found, expected = await there.step(action), await here.step(action)
            assert found[:4] == expected[:4]
            assert without_times(found[4]) == without_times(expected[4])
        assert there.fork_mode == "snapshot"
        await there.close()


async def test_a_limit_of_the_client_is_graded_by_the_server() -> None:
    async with served() as (_, url):
        env = OpenEnv(task(), url)
        await env.reset(seed=1)
        await env.step(add(2))
        reward, info = await env.finish(Limit.TURNS, Message("assistant", "3"))
        assert (reward, info["success"], info["parts"]) == (1.0, True, {"calls": 1.0})
        assert (await env.finish(Limit.TURNS, None))[0] == 0.0
        await env.close()


async def test_forks_satisfy_the_fork_law() -> None:
    async with served() as (server, url):
        actions = [
            {"content": "", "tool_calls": [{"name": "add", "arguments": {"number": 1}}]},
            {"type": "call_tool", "tool_name": "add", "arguments": {"number": 2}},
            {"content": "3"},
        ]
        await check_fork_law(url, actions, {"seed": 3, "split": "train", "index": 0})
        await asyncio.sleep(0.1)
        assert len(server._sessions) == 0


async def test_a_batch_of_forks_beyond_the_number_of_sessions_is_refused_whole() -> None:
    async with served(max_sessions=3) as (server, url):
        env = OpenEnv(task(), url)
        await env.reset(seed=1)
        async with aiohttp.ClientSession() as http:
            id = env._session("test")._id
            asked = {"method": "openenv/session/fork", "params": {"session_id": id, "count": 3}}
            answer = await (await http.post(f"{url}/mcp", json=asked)).json()
        assert "1 of 3" in answer["error"]["message"]
        assert len(server._sessions) == 1
        await env.close()


async def test_a_new_session_waits_and_a_fork_is_refused_when_all_are_in_use() -> None:
    async with served(max_sessions=1) as (_, url):
        first, second, third = (OpenEnv(task(), url) for _ in range(3))
        await first.reset(seed=1)
        with pytest.raises(InfraError, match="1 of 1"):
            await second.reset(seed=1)
        with pytest.raises(EnvError, match="1 of 1"):
            await first.fork()
        await second.close()
        waiting = asyncio.ensure_future(third.reset(seed=1))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await first.close()
        await waiting
        await third.close()


async def test_a_session_without_a_client_ends() -> None:
    async with served(idle_s=0.2) as (server, url):
        async with aiohttp.ClientSession() as http:
            asked = {"method": "openenv/session/create"}
            await http.post(f"{url}/mcp", json=asked)
        assert len(server._sessions) == 1
        await asyncio.sleep(0.5)
        assert len(server._sessions) == 0


async def test_a_server_with_a_key_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    async with served(key="secret") as (_, url):
        with pytest.raises(ConfigError, match="401"):
            await OpenEnv(task(), url).reset(seed=1)
        env = OpenEnv(task(), url, headers={"Authorization": "Bearer ${SERVER_KEY}"})
        assert (await env.reset(seed=1))[0][-1].content == "Count to 3."
        await env.close()


async def test_rows_are_the_tasks_of_the_server_by_split() -> None:
    async with served() as (_, url):
        # a path keeps one of the two slashes
        path: Any = f"openenv:{url}".replace("//", "/")
        rows = await asyncio.to_thread(lambda: [*generated_rows(path, {}, held_out=False)])
        assert [one.row["id"] for one in rows] == ["t3", "t4"]
        assert rows[1].row["openenv"] == {"split": "train", "index": 1}
        assert rows[1].row["question"] == "Count to 4."
        rows = await asyncio.to_thread(lambda: [*generated_rows(path, {}, held_out=True)])
        assert [one.row["openenv"] for one in rows] == [{"split": "test", "index": 0}]
        with pytest.raises(DataError, match=r"'dev'.*'train'.*'test'"):
            await asyncio.to_thread(list, generated_rows(path, {"split": "dev"}, held_out=False))
        with pytest.raises(DataError, match="source has no"):
            await asyncio.to_thread(lambda: [*generated_rows(path, {"sized": 3}, held_out=False)])


async def test_a_missing_server_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"1\.x.*http://127.0.0.1:9"):
        await OpenEnv(task(), "http://127.0.0.1:9").reset(seed=1)


@asynccontextmanager
async def answering(
    version: str = "1.0.0", tools: Any = (), ws: Any = None, action: Any = None
) -> AsyncIterator[str]:
    """A server with scripted answers."""

    async def api(http: web.Request) -> web.Response:
        return web.json_response({"info": {"version": version}})

    async def schema(http: web.Request) -> web.Response:
        return web.json_response({"action": action or {}, "observation": {}, "state": {}})

    async def mcp(http: web.Request) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "result": {"tools": list(tools)}})

    async def socket(http: web.Request) -> web.WebSocketResponse:
        one = web.WebSocketResponse()
        await one.prepare(http)
        async for message in one:
            await ws(one, message.json())
        return one

    app = web.Application()
    app.router.add_get("/openapi.json", api)
    app.router.add_get("/schema", schema)
    app.router.add_post("/mcp", mcp)
    app.router.add_get("/ws", socket)
    async with listening(app) as url:
        yield url


def observed(text: str, reward: float | None = None, done: bool = False) -> Any:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


BEGUN = "?\n\nbegin< |im_end|>"  # a part of the prompt
MOVE = {"properties": {"move": {"type": "string"}, "metadata": {}}, "required": ["move"]}


async def test_a_server_of_another_version_is_refused() -> None:
    async with answering(version="2.1.0") as url:
        with pytest.raises(ConfigError, match=r"1.x.*2\.1\.0"):
            await OpenEnv(task(), url).reset(seed=1)


async def test_a_late_or_lost_answer_ends_the_session() -> None:
    async def late(ws: Any, message: Any) -> None:
        if message["type"] == "reset":
            await ws.send_json(observed("begin"))

    async with answering(ws=late, action=MOVE) as url:
        env = OpenEnv(task(), url, timeout_s=0.3)
        await env.reset(seed=1)
        with pytest.raises(EnvError, match=r"answer within 0\.3"):
            await env.step(Message("assistant", "e2e4"))
        with pytest.raises(EnvError, match="session is lost"):
            await env.step(Message("assistant", "e2e4"))
        await env.close()

    async def ends(ws: Any, message: Any) -> None:
        await (ws.send_json(observed("begin")) if message["type"] == "reset" else ws.close())

    async with answering(ws=ends, action=MOVE) as url:
        env = OpenEnv(task(), url)
        await env.reset(seed=1)
        with pytest.raises(EnvError, match="session is lost"):
            await env.step(Message("assistant", "e2e4"))
        await env.close()


@pytest.mark.parametrize("chance", [0.0, 1.0])
async def test_forks_are_replays_after_enough_exact_replays_of_episodes(chance: float) -> None:
    num_resets, games = 0, dict[Any, Any]()

    async def game(ws: Any, message: Any) -> None:
        nonlocal num_resets
        num_resets += message["type"] == "reset"
        if message["type"] == "reset":
            games[ws] = [], num_resets * chance
            return await ws.send_json(observed("begin<|im_end|>"))
        move = message["data"]["move"]
        if move == "bad":
            wrong = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}
            return await ws.send_json({"type": "error", "data": wrong})
        moves, luck = games[ws]
        moves.append(move)
        return await ws.send_json(observed(f"{' '.join(moves)} {luck}", 0.5, len(moves) == 2))

    async with answering(ws=game, action=MOVE) as url:
        modes = []
        for _ in range(5):
            env = OpenEnv(task(seed=5), url)
            prompt, info = await env.reset(seed=1)
            assert (prompt[-1].content, info["tools"][0]["name"]) == (BEGUN, "step")
            modes.append(env.fork_mode)
            refused = await env.step(Message("assistant", "<think>.</think>bad"))
            assert refused[0] == [Message("user", "Invalid message")]
            call = Message("assistant", "", (ToolCall("step", {"move": "a"}),))
            messages, reward, *_ = await env.step(call)
            assert (messages[0].role, messages[0].content[0], reward) == ("tool", "a", 0.5)
            if env.fork_mode == "replay":
                child = await env.fork()
                assert (await child.step(call))[1:4] == (0.5, True, False)
                await child.close()
            *_, ended, _, info = await env.step(Message("assistant", "b"))
            assert (ended, info["success"]) == (True, True)
            await env.close()
        expected = ["none"] * 5 if chance else ["none"] * 4 + ["replay"]
        assert modes == expected
        assert env.server.stats()["openenv/num_refused"] == (1 if chance else 0)


def without_times(info: Any) -> Any:
    calls = [{k: v for k, v in one.items() if k != "duration_s"} for one in info["tool_calls"]]
    return {**info, "tool_calls": calls}
