"""Environments as an OpenEnv (1.x) server: sessions over WebSockets and JSON-RPC.

    /ws        {"type": "reset" | "step" | "state" | "mcp" | "close", "data": {..}}; one session per
               connection
    /mcp       JSON-RPC, by POST or as a WebSocket: tools/list, tools/call, openenv/session/create,
               openenv/session/close, and openenv/session/fork, a proposed capability
    /reset /step /state                    each with a separate environment, which then ends
    /health /metadata /schema /openapi.json
    /list_environments /NAME/splits /NAME/num_tasks /NAME/task /NAME/task_range

An action is a turn of the policy, {"content": text, "tool_calls": [{"name", "arguments"}, ..]},
whose text is graded if it has no calls; or one call in MCP's form, {"type": "call_tool",
"tool_name", "arguments"}. The observation of a turn, and of a reset, is {"messages": [..]}. "limit"
in a turn means that a limit of the client ended the episode: the text so far is graded. The package
openenv is not needed. docs/openenv.md has the law of forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random, SystemRandom
from typing import Annotated, Any

from aiohttp import WSMsgType, web
from msgspec import Meta, Struct, field

from agentenv.base.deadline import uncancelled
from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.types import Limit, Message, Task, ToolCall
from agentenv.base.untrusted import convert, decode
from agentenv.contract.env import Env
from agentenv.contract.function_tool import argument_schema
from agentenv.endpoint.listener import BODY_S, Listener, body_of, encode, json_response
from agentenv.endpoint.sessions import ServeSession, SessionRefused, Sessions

VERSION = "1.0.0"  # of the protocol
CODES = {  # of errors, for WebSockets and JSON-RPC
    "invalid": ("VALIDATION_ERROR", -32602), "unknown": ("UNKNOWN_TYPE", -32601),
    "full": ("CAPACITY_REACHED", -32000), "ended": ("EXECUTION_ERROR", -32600),
    "made": ("FACTORY_ERROR", -32000), "lost": ("SESSION_ERROR", -32000),
}  # fmt: skip
USUAL = ("train", "validation", "test")  # types of splits
ANSWERS = {"responses": {"200": {"description": "OK"}}}

Json = dict[str, Any]


class Action(Struct):
    """A turn, or one call in MCP's form."""

    type: str = "turn"
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_name: str = ""
    arguments: Json = field(default_factory=dict)
    limit: Limit | None = None


class Observation(Struct):
    """The messages that answer a turn; after a reset, the prompt."""

    messages: list[Json] = field(default_factory=list)
    metadata: Json = field(default_factory=dict)


class State(Struct):
    """State of a session."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None


class _Reset(Struct):
    seed: int | None = None
    split: str = ""
    index: int | None = None


class _Params(Struct):
    session_id: str = ""
    count: Annotated[int, Meta(ge=1, le=256)] = 1
    name: str = ""
    arguments: Json = field(default_factory=dict)


class _Request(Struct):
    """A message of a WebSocket, or one of JSON-RPC."""

    type: str = ""
    data: Json = field(default_factory=dict)
    method: str = ""
    params: _Params = field(default_factory=_Params)
    id: str | int | None = None


class EnvServer(Listener):
    """Serves environments that `make_env` creates for the tasks of `splits`, under `name`.

    With a `key`, each request except /health must have `Authorization: Bearer KEY`. At most
    `max_sessions` are open; a session that is idle for `idle_s` seconds ends. An answer of an
    environment may take `timeout_s` seconds at most.
    """

    def __init__(
        self,
        name: str,
        make_env: Callable[[Task], Env],
        splits: Mapping[str, Sequence[Task]],
        *,
        key: str = "",
        max_sessions: int = 4096,
        idle_s: float = 3600.0,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(key)
        self.name, self._splits = name, splits
        self._sessions = Sessions(make_env, max_sessions, idle_s, timeout_s)
        self._tools: list[Json] = []
        self._capabilities: list[str] = []

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Test the environment, then listen; port 0 is any free one. Raises ConfigError."""
        first = ServeSession()
        try:
            await self._reset(first, {"seed": 0, "index": 0})
            self._capabilities = [] if first.live().fork_mode == "none" else ["fork"]
        except SessionRefused as error:
            raise ConfigError(f"{self.name}: {error}") from error
        finally:
            await self._sessions.end(first)
        gets = {path: partial(_show, page) for path, page in self._pages().items()}
        posts = dict.fromkeys(("/mcp", "/reset", "/step"), self._post)
        posts[f"/{self.name}/{{what:num_tasks|task|task_range}}"] = self._list
        await self.listen(gets | {"/ws": self._attend, "/mcp": self._attend}, posts, host, port)

    async def close(self) -> None:
        """Stop listening and end all sessions. Idempotent."""
        try:
            await super().close()
        finally:
            await uncancelled(self._sessions.close())

    def _pages(self) -> Json:
        about = {"name": self.name, "description": f"{self.name}, served by agentenv"}
        api = {"title": self.name, "version": VERSION, "x-openenv-capabilities": self._capabilities}
        posts = {path: {"post": ANSWERS} for path in ("/reset", "/step", "/mcp")}
        gets = {path: {"get": ANSWERS} for path in ("/state", "/health", "/metadata", "/schema")}
        types = {name: name if name in USUAL else "validation" for name in self._splits}
        kinds: list[type[Struct]] = [Action, Observation, State]
        return {
            "/health": {"status": "healthy"},
            "/metadata": {**about, "version": VERSION},
            "/schema": {kind.__name__.lower(): argument_schema(kind) for kind in kinds},
            "/state": State(),
            "/openapi.json": {"openapi": "3.1.0", "info": api, "paths": {**posts, **gets}},
            "/list_environments": [self.name],
            f"/{self.name}/splits": [{"name": name, "type": kind} for name, kind in types.items()],
        }

    async def _list(self, http: web.Request) -> web.Response:
        request, what = _read(await body_of(http) or b"{}", dict), http.match_info["what"]
        tasks = self._tasks(request.get("split"))
        span = slice(request.get("start"), request.get("stop"))
        places = [request.get("index")] if what == "task" else range(len(tasks))[span]
        found = [_named(_at(tasks, index), index) for index in places]
        one = {"task": found[0]} if what == "task" else {"tasks": found}
        return json_response({"num_tasks": len(tasks)} if what == "num_tasks" else one)

    def _tasks(self, split: object) -> Sequence[Task]:
        if split not in self._splits:
            raise SessionRefused("invalid", f"unknown split {split!r}; known: {[*self._splits]}")
        return self._splits[str(split)]

    async def _post(self, http: web.Request) -> web.Response:
        """JSON-RPC, or a reset and a step without a session."""
        body, session = await body_of(http), ServeSession()
        if http.path == "/mcp":
            return json_response(await self._rpc(body, None))
        request = _read(body or b"{}", dict)
        try:
            found = await self._reset(session, request if http.path == "/reset" else {})
            if http.path == "/step":
                found = await self._step(session, request.get("action"))
            return json_response(found)
        finally:
            await uncancelled(self._sessions.end(session))

    async def _attend(self, http: web.Request) -> web.WebSocketResponse:
        """Serve a WebSocket; its session ends with it."""
        ws = web.WebSocketResponse(compress=False, max_msg_size=self.max_bytes)
        answer = self._rpc if http.path == "/mcp" else self._answer
        attached: list[ServeSession] = []
        try:
            with suppress(TimeoutError, ConnectionError):  # the client has left
                await ws.prepare(http)
                attached.append(self._attached(http.query.get("session_id")))
                while (got := await ws.receive(self._sessions.idle_s)).type is WSMsgType.TEXT:
                    if (reply := await answer(got.data, attached[0])) is None:
                        break
                    await _send(ws, reply)
        except SessionRefused as error:
            await _send(ws, self._refusal(error))
        finally:
            await uncancelled(self._sessions.end(*attached))
        return ws

    def _attached(self, id: str | None) -> ServeSession:
        session = self._sessions.found(id) if id else self._sessions.add(1)[0]
        if session.is_attached:
            raise SessionRefused("invalid", f"session {id} already has a socket")
        session.is_attached = True
        return session

    async def _answer(self, text: str, session: ServeSession) -> Json | None:
        """The reply to a message; None if it ends the session."""
        try:
            request = _read(text, _Request)
            if request.type == "close":
                return None
            if request.type == "state":
                task_id = session.task.id if session.task else None
                return {"type": "state", "data": State(session.id, session.num_steps, task_id)}
            if request.type == "mcp":
                return {"type": "mcp", "data": await self._rpc(request.data, session)}
            if request.type not in ("reset", "step"):
                raise SessionRefused("unknown", f"Unknown message type: {request.type}")
            async with session.lock:
                take = self._reset if request.type == "reset" else self._step
                return {"type": "observation", "data": await take(session, request.data)}
        except SessionRefused as error:
            return self._refusal(error)

    def _refusal(self, error: SessionRefused) -> Json:
        counts = {"active_sessions": len(self._sessions), "max_sessions": self._sessions.most}
        reply = {"message": str(error), "code": CODES[error.code][0]}
        return {"type": "error", "data": reply | (counts if error.code == "full" else {})}

    async def _rpc(self, given: str | bytes | Json, session: ServeSession | None) -> Json:
        answer: Json = {"jsonrpc": "2.0", "id": None}
        try:
            request = _read(given, _Request)
            answer["id"] = request.id
            return answer | {"result": await self._result(request.method, request.params, session)}
        except SessionRefused as error:
            return answer | {"error": {"code": CODES[error.code][1], "message": str(error)}}

    async def _result(self, method: str, params: _Params, session: ServeSession | None) -> Json:
        if method == "tools/list":
            return {"tools": [_listed(tool, "inputSchema") for tool in self._tools]}
        if method == "openenv/session/create":
            return {"session_id": (session or self._sessions.add(1)[0]).id}
        if method not in ("tools/call", "openenv/session/close", "openenv/session/fork"):
            raise SessionRefused("unknown", f"Method not found: {method}")
        id = params.session_id or (session.id if session else "")
        named = self._sessions.found(id)
        if method == "openenv/session/close":
            if named.is_attached:
                raise SessionRefused(
                    "invalid", f"session {id} has a socket: close the socket instead"
                )
            await self._sessions.end(named)
            return {"session_id": id, "closed": True}
        async with named.lock:
            if method == "openenv/session/fork":
                made = await self._sessions.fork(named, params.count)
                return {"session_ids": [one.id for one in made]}
            call = {"tool_name": params.name, "arguments": params.arguments}
            found = await self._step(named, {"type": "call_tool", **call})
        return dict(found["observation"]["result"])

    async def _reset(self, session: ServeSession, chosen: Json) -> Json:
        request = _read(chosen, _Reset)
        tasks = self._tasks(request.split or next(iter(self._splits)))
        draw = SystemRandom() if request.seed is None else Random(request.seed)
        index = draw.randrange(len(tasks)) if request.index is None else request.index
        messages, info = await self._sessions.begin(session, _at(tasks, index), request.seed)
        self._tools = self._tools or list(info.get("tools", ()))
        return _observed({"messages": messages}, session_id=session.id)

    async def _step(self, session: ServeSession, given: Any) -> Json:
        request = _read(given, Action)
        if request.type == "list_tools":
            return _observed({"tools": [_listed(one, "input_schema") for one in self._tools]})
        calls = (ToolCall(request.tool_name, request.arguments),)
        calls = calls if request.type == "call_tool" else tuple(request.tool_calls)
        turn = Message("assistant", request.content, calls)
        if request.limit is not None:
            last = turn if turn.content or calls else None
            reward, info = await self._sessions.finish(session, request.limit, last)
            return _observed({"messages": []}, reward, True, info=info, truncated=True)
        taken = await self._sessions.step(session, turn)
        messages, reward, _, truncated, info = taken
        observation: Json = {"messages": messages}
        if request.type == "call_tool":
            text = "\n".join(one.content for one in messages)
            failed = any(not one["ok"] for one in info.get("tool_calls", ()))
            result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": failed}
            observation = {"tool_name": request.tool_name, "result": result, "error": None}
        return _observed(observation, reward, session.has_ended, info=info, truncated=truncated)


def _read(given: Any, kind: type[Any]) -> Any:
    try:
        return decode(given, kind) if isinstance(given, str | bytes) else convert(given, kind)
    except ForeignError as error:
        raise SessionRefused("invalid", f"Invalid message: {error}") from error


def _at(tasks: Sequence[Task], index: Any) -> Task:
    if type(index) is not int or not 0 <= index < len(tasks):
        raise SessionRefused(
            "invalid", f"index {index} is out of range: there are {len(tasks)} tasks"
        )
    return tasks[index]


def _observed(seen: Json, reward: float | None = None, done: bool = False, **facts: Any) -> Json:
    return {"observation": {**seen, "metadata": facts}, "reward": reward, "done": done}


def _named(task: Task, index: int) -> Json:
    return {"id": task.id, "index": index, "question": task.question, "kind": task.kind}


def _listed(tool: Json, schema: str) -> Json:
    return {"name": tool["name"], "description": tool["description"], schema: tool["parameters"]}


async def _show(page: Any, http: web.Request) -> web.Response:
    return json_response(page)


async def _send(ws: web.WebSocketResponse, answer: Json) -> None:
    async with asyncio.timeout(BODY_S):
        await ws.send_str(encode(answer).decode())
