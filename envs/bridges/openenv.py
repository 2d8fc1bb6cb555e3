"""The environment `agentenv/OpenEnv-v0`: a client of any OpenEnv (1.x) server.

    [env]
    id = "agentenv/OpenEnv-v0"
    kwargs = { url = "http://127.0.0.1:8000" }
    # kwargs = { url = "https://..", headers = { Authorization = "Bearer ${MY_TOKEN}" } }

    [data]
    train = "openenv:http://127.0.0.1:8000"    # its tasks, or seeds if it has none
    source = { size = 1000 }

An episode is a separate session. Its tools are the server's; a typed action is one tool, `step`,
and if it is a single text, a turn without a call is that text. The observation of the reset follows
the question in the prompt; if it has messages, they are the prompt. Rewards are the server's, step
by step. The server is trusted code.

A server that declares the capability forks by itself (docs/openenv.md). Otherwise a fork is a
replay, whose answers are compared with the first ones; if most replays differ, there are no forks.
A session that is lost, or answers too late, fails its step; the rollout replays it in a fresh one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from agentenv.base.deadline import uncancelled, waiting
from agentenv.base.errors import ConfigError, DataError, EnvError, InfraError, ToolError
from agentenv.base.types import Task
from agentenv.contract.env import shared
from agentenv.contract.function_tool import inlined
from agentenv.contract.http import JsonSocket
from agentenv.contract.http_client import fetch, fetched
from agentenv.contract.http_session import HttpSession
from agentenv.envs.bridges import sessions
from agentenv.envs.bridges.mcp_tools import expanded
from agentenv.envs.bridges.sessions import Json, Session, SessionAnswer, SessionCall, SessionTool

PAGE = 100  # tasks per request


class _Reply(Struct):
    type: str
    data: SessionAnswer


class OpenEnv(sessions.SessionEnv):
    """One session of the server at `url`.

    Each request has `headers`, in which "${NAME}" is an environment variable. An answer may take
    `timeout_s` seconds at most. See SessionEnv for `success`.
    """

    key = "openenv"

    def __init__(
        self,
        task: Task,
        url: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        success: float = 1.0,
    ) -> None:
        key = ("openenv", url, tuple(sorted((headers or {}).items())), timeout_s)
        server = shared(key, lambda: OpenEnvServers(url, headers or {}, timeout_s))
        super().__init__(task, server, success, 2 * timeout_s)


class OpenEnvServers(sessions.SessionServer):
    """The HTTP server."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        super().__init__(url.rstrip("/"))
        self.timeout_s, self.headers = timeout_s, expanded("OpenEnv", "headers", headers)
        self.http = HttpSession(headers=self.headers)
        self.num_open, self.most, self.freed = 0, 1 << 30, asyncio.Event()  # sessions

    def session(self) -> OpenEnvSession:
        return OpenEnvSession(self)

    async def measure(self, session: Session) -> None:
        """Replay one of the first episodes; forks are replays after NUM_MEASURED equal ones."""
        if self.mode != "none" or self.num_refused:
            return
        other = self.session()
        try:
            with suppress(EnvError, InfraError):
                await other.replay(session.record)
        finally:
            await uncancelled(other.close())
        if self.num_replays >= sessions.NUM_MEASURED:
            self.mode = "replay"

    async def describe(self) -> None:
        """Request version, action and tools."""
        try:
            api, schema = await self.request("/openapi.json"), await self.request("/schema")
            listed = await self.request("/mcp", _rpc("tools/list"))
            version, action = str(api["info"]["version"]), schema["action"]
            tools = listed.get("result", {}).get("tools", ())
        except (DataError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"no OpenEnv 1.x server at {self.url}: {error}") from error
        if not version.startswith("1."):
            raise ConfigError(f"{self.url}: expected OpenEnv version 1.x, got {version}")
        if "fork" in api["info"].get("x-openenv-capabilities", ()):
            self.mode = "snapshot"
        action = inlined(action, action.get("$defs", {}), ())
        fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        self.takes_turns = {"content", "tool_calls"} <= fields.keys()
        if fields and "tool_name" not in fields:
            keys, about = action.get("required", []), action.get("description", "One action.")
            self.text_key = (
                keys[0] if [fields[key].get("type") for key in keys] == ["string"] else ""
            )
            schema = {"type": "object", "properties": fields, "required": keys}
            tools = [{"name": sessions.STEP, "description": about, "inputSchema": schema}]
        self.tools = [SessionTool(self), *map(SessionCall, tools)]

    async def request(self, path: str, body: Json | None = None) -> Any:
        """The answer to an HTTP request. Raises DataError."""
        return await fetched(self.url + path, self.headers, body)

    def stats(self) -> dict[str, float]:
        """The number of replays, and of those that differed."""
        return {"openenv/num_replays": self.num_replays, "openenv/num_refused": self.num_refused}

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self.http.close()


class OpenEnvSession(Session):
    """A session over a WebSocket."""

    def __init__(self, server: OpenEnvServers) -> None:
        super().__init__(server)
        self._id = ""
        self._socket: JsonSocket | None = None

    async def begin(self, chosen: Json, waits: bool = True) -> Json:
        while waits and self.server.num_open >= self.server.most:
            self.server.freed.clear()
            with waiting(f"a session of {self.server.url}"):
                await self.server.freed.wait()
        await self._connect("")
        observation = await self.take(chosen, "reset")
        self._id = str((observation.get("metadata") or {}).get("session_id"))
        return observation

    async def copy_to(self, other: OpenEnvSession) -> None:
        try:
            if self.server.mode != "snapshot":
                return await other.replay(self.record)
            request = _rpc("openenv/session/fork", session_id=self._id)
            made = await self.server.request("/mcp", request)
            if "error" in made:
                raise InfraError(str(made["error"]))
            return await other._connect(made["result"]["session_ids"][0])
        except (DataError, LookupError, InfraError) as error:
            raise EnvError(f"{self.server.url}: a session cannot be copied: {error}") from error

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self.server.num_open -= 1
            self.server.freed.set()
            await socket.close()

    async def _connect(self, made: str) -> None:
        server, self._id = self.server, made
        address = f"{server.url}/ws?session_id={made}" if made else f"{server.url}/ws"
        self._socket, server.num_open = JsonSocket(address, server.timeout_s), server.num_open + 1
        await self._socket.connect(server.http)

    async def take(self, data: Json, kind: str = "step") -> Json:
        if self._socket is None or (self.has_ended and "limit" not in data):
            raise ToolError("The episode has ended.")
        reply = await self._socket.request({"type": kind, "data": data}, _Reply)
        found, where = reply.data, f"{self.server.url}: {kind}"
        self.record.append((kind, data, found))
        self.has_ended = found.done
        if reply.type != "error":
            return found.observation
        if found.code == "CAPACITY_REACHED":
            self.server.most = max(1, found.max_sessions)
            raise InfraError(f"{where}: {found.message}")
        if kind != "step" or found.code == "SESSION_ERROR":
            raise EnvError(f"{where}: {found.message}")
        wrong = [f"{one.get('loc')}: {one.get('msg')}" for one in found.errors]
        raise ToolError("; ".join([found.message, *wrong]))


def _rpc(method: str, **params: Any) -> Json:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def rows(url: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Json]:
    """The tasks of a server, or seeds if it lists none. `options`: split (default "train", or
    "test" for held-out ones), size, seed, question (replaces the server's), headers. Raises
    DataError."""
    url = url.rstrip("/").replace("://", ":/").replace(":/", "://", 1)  # paths may have one slash
    known = ("split", "size", "seed", "question", "headers")
    if unknown := sorted(options.keys() - set(known)):
        raise DataError(f"openenv:{url}: source has no {unknown}; known: {', '.join(known)}")
    headers = expanded("source", "headers", options.get("headers"))

    def get(path: str, body: Json | None = None) -> Any:
        return fetch(url + path, headers, body)

    name = (get("/list_environments") or ["openenv"])[0]
    splits = [one["name"] for one in get(f"/{name}/splits") or ()]
    split = options.get("split", "test" if held_out else "train")
    if splits and split not in splits:
        raise DataError(f"openenv:{url}: no split {split!r}; source.split must be one of {splits}")
    about = (get("/metadata") or {}).get("description")
    first = options.get("seed", sessions.HELD_OUT_SEED if held_out else 0)
    number = options.get("size", sessions.SIZE)
    if splits:
        count = get(f"/{name}/num_tasks", {"split": split})["num_tasks"]
        number = min(count, options.get("size", count))
    for start in range(0, number, PAGE):
        page = {"split": split, "start": start, "stop": min(number, start + PAGE)}
        found = get(f"/{name}/task_range", page)["tasks"] if splits else [{}] * PAGE
        for index, given in enumerate(found[: number - start], start):
            task = given if isinstance(given, dict) else {"question": given}
            chosen = {"split": split, "index": index} if splits else {"seed": first + index}
            id = task.get("id", "-".join(map(str, chosen.values())))
            text = options.get("question") or task.get("question") or task.get("prompt") or about
            row = {"id": str(id), "question": str(text), "kind": task.get("kind", name)}
            yield {**row, "answer": "one that the server rewards", OpenEnv.key: chosen}
