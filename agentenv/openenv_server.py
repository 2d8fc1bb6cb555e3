"""Our environments as a server of OpenEnv (1.x): sessions over WebSockets and JSON-RPC.

    /ws        {"type": "reset" | "step" | "state" | "mcp" | "close", "data": {..}}; a session each
    /mcp       JSON-RPC, by POST or as a WebSocket: tools/list, tools/call, openenv/session/create,
               openenv/session/close, and openenv/session/fork, the capability that is proposed
    /reset /step /state                    each with an environment of its own, which then ends
    /health /metadata /schema /openapi.json
    /list_environments /NAME/splits /NAME/num_tasks /NAME/task /NAME/task_range

An action is a turn of the policy, {"content": text, "tool_calls": [{"name", "arguments"}, ..]},
whose text is graded where it calls nothing; or one call as MCP has it, {"type": "call_tool",
"tool_name", "arguments"}. The observation of a turn, and of a reset, is {"messages": [..]}. With
"limit" in a turn the policy says that a limit of its own ended the episode: what it wrote so far is
graded. The package openenv is not needed. docs/openenv.md has the law of forks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hmac import compare_digest
from random import Random, SystemRandom
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler, Middleware
from msgspec import Struct, field

from agentenv.deadline import uncancelled
from agentenv.endpoint.server import Listener, key_of
from agentenv.env import Env, check_finish, check_reset, check_step
from agentenv.errors import AgentEnvError, ConfigError, ForeignError, guarded
from agentenv.tools import argument_schema
from agentenv.types import Limit, Message, Task, ToolCall
from agentenv.untrusted import convert, decode

VERSION = "1.0.0"  # of the protocol
MAX_BYTES = 64 << 20  # of a request
MAX_FORKS = 256  # of one request
SEND_S = 60.0
CODES = {"VALIDATION_ERROR": -32602, "INVALID_JSON": -32600, "UNKNOWN_TYPE": -32601}  # of JSON-RPC
FAILED = -32000
ANSWERS = {"responses": {"200": {"description": "OK"}}}

Json = dict[str, Any]

logger = logging.getLogger(__name__)


class Action(Struct):
    """A turn, or one call in the words of MCP."""

    type: str = "turn"
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_name: str = ""
    arguments: Json = field(default_factory=dict)
    limit: Limit | None = None
    metadata: Json = field(default_factory=dict)


class Observation(Struct):
    """The messages that answer a turn; those of a reset are the prompt."""

    messages: list[Json] = field(default_factory=list)
    metadata: Json = field(default_factory=dict)


class State(Struct):
    """Where a session is."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None


class _Reset(Struct):
    seed: int | None = None
    episode_id: str | None = None
    split: str = ""
    index: int | None = None


class _Request(Struct):
    type: str = ""
    data: Json = field(default_factory=dict)
    method: str = ""
    params: Json = field(default_factory=dict)
    id: str | int | None = None


class Refused(Exception):
    """What is answered by an error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """One episode at a time; what it is asked is done in order."""

    def __init__(self, now: float) -> None:
        self.id, self.used = str(uuid4()), now
        self.env: Env | None = None
        self.state = State()
        self.has_ended = self.is_attached = False
        self.lock = asyncio.Lock()


class EnvServer(Listener):
    """Serves the environments that `make_env` makes of the tasks of `splits`, as `name`.

    With a `key`, each request but /health brings it as `Authorization: Bearer KEY`. At most
    `max_sessions` are open; one that is not used for `idle_s` ends. No answer of an environment may
    take over `timeout_s`.
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
        super().__init__()
        self.name, self._make_env, self._splits = name, make_env, splits
        self._key, self._max_sessions = key, max_sessions
        self._idle_s, self._timeout_s = idle_s, timeout_s
        self._sessions: dict[str, Session] = {}
        self._tools: list[Json] = []
        self._capabilities: list[str] = []
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Try the environment, then listen; port 0 is any that is free. Raises ConfigError."""
        if not self._key and host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(f"host {host}: other machines reach it; name a key (api_key_env)")
        first = Session(0.0)
        try:
            await self._reset(first, {"seed": 0, "index": 0})
            self._capabilities = ["fork"] if first.env and first.env.fork_mode != "none" else []
        except Refused as error:
            raise ConfigError(f"{self.name}: {error}") from error
        finally:
            await self._end(first)
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[self._guard()])
        for path, page in self._pages().items():
            app.router.add_get(path, page)
        for path in ("/ws", "/mcp"):
            app.router.add_get(path, self._attend)
        for path in ("/mcp", "/reset", "/step"):
            app.router.add_post(path, self._post)
        app.router.add_post(f"/{self.name}/{{what:num_tasks|task|task_range}}", self._tasks)
        await self.listen(app, host, port)
        self._reaper = asyncio.ensure_future(self._reap())

    async def close(self) -> None:
        """Stop listening and end all sessions. Idempotent."""
        if self._reaper is not None:
            self._reaper.cancel()
        try:
            await super().close()
        finally:
            await uncancelled(self._end(*self._sessions.values()))

    def _pages(self) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
        about = f"{self.name}, served by agentenv"
        paths = {path: {"post": ANSWERS} for path in ("/reset", "/step", "/mcp")}
        gets = ("/state", "/health", "/metadata", "/schema")
        api = {"title": self.name, "version": VERSION, "x-openenv-capabilities": self._capabilities}
        schemas: dict[str, type[Struct]] = {
            "action": Action,
            "observation": Observation,
            "state": State,
        }
        usual = ("train", "validation", "test")
        found = {
            "/health": {"status": "healthy"},
            "/metadata": {"name": self.name, "description": about, "version": VERSION},
            "/schema": {
                name: {"title": kind.__name__, **argument_schema(kind)}
                for name, kind in schemas.items()
            },
            "/state": State(),
            "/openapi.json": {
                "openapi": "3.1.0",
                "info": api,
                "paths": paths | {path: {"get": ANSWERS} for path in gets},
            },
            "/list_environments": [self.name],
            f"/{self.name}/splits": [
                {"name": name, "type": name if name in usual else "validation"}
                for name in self._splits
            ],
        }
        return {path: _page(body) for path, body in found.items()}

    def _guard(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            """The key, and errors in the form of the protocol."""
            known = compare_digest(key_of(request).encode(), self._key.encode())
            if self._key and not known and request.path != "/health":
                return _json({"detail": "give the key as Authorization: Bearer KEY"}, 401)
            try:
                return await handler(request)
            except web.HTTPException as error:
                return _json({"detail": error.text}, error.status)
            except Refused as error:
                return _json({"detail": str(error)}, 422)

        return guard

    async def _tasks(self, http: web.Request) -> web.Response:
        asked, what = _read(await _body(http), dict), http.match_info["what"]
        tasks = self._split(asked.get("split"))
        if what == "num_tasks":
            return _json({"num_tasks": len(tasks)})
        span = slice(asked.get("start"), asked.get("stop"))
        places = [asked.get("index")] if what == "task" else range(len(tasks))[span]
        found = [{"index": i, **_named(self._task(tasks, i))} for i in places]
        return _json({"task": found[0]} if what == "task" else {"tasks": found})

    async def _post(self, http: web.Request) -> web.Response:
        """JSON-RPC, or a reset, and a step after it, outside of sessions."""
        body = await _body(http)
        if http.path == "/mcp":
            return _json(await self._rpc(body, None))
        session, asked = Session(0.0), _read(body or "{}", dict)
        try:
            found = await self._reset(session, asked if http.path == "/reset" else {})
            if http.path == "/step":
                found = await self._step(session, asked.get("action"))
            return _json(found)
        finally:
            await uncancelled(self._end(session))

    async def _attend(self, http: web.Request) -> web.WebSocketResponse:
        """A WebSocket, with which its session ends."""
        ws = web.WebSocketResponse(compress=False, max_msg_size=MAX_BYTES)
        answer = self._rpc if http.path == "/mcp" else self._answer
        attached: list[Session] = []
        try:
            await ws.prepare(http)
            id = http.query.get("session_id")
            session = self._found(id) if id else self._open(1)[0]
            if session.is_attached:
                raise Refused("SESSION_ERROR", f"session {id} has a socket already")
            session.is_attached = True
            attached.append(session)
            while (message := await ws.receive(self._idle_s)).type is WSMsgType.TEXT:
                if (said := await answer(message.data, session)) is None:
                    break
                await _send(ws, said)
        except Refused as error:
            await _send(ws, self._refusal(error))
        except (TimeoutError, ConnectionError):
            logger.debug("a client has left")
        finally:
            await uncancelled(self._leave(ws, attached))
        return ws

    async def _leave(self, ws: web.WebSocketResponse, attached: list[Session]) -> None:
        await self._end(*attached)
        await ws.close()

    def _found(self, id: object) -> Session:
        if (session := self._sessions.get(str(id))) is None:
            raise Refused("VALIDATION_ERROR", f"Unknown session_id: {id}")
        session.used = asyncio.get_running_loop().time()
        return session

    def _open(self, number: int) -> list[Session]:
        if len(self._sessions) + number > self._max_sessions:
            text = f"{len(self._sessions)} of {self._max_sessions} sessions are open"
            raise Refused("CAPACITY_REACHED", text)
        made = [Session(asyncio.get_running_loop().time()) for _ in range(number)]
        self._sessions |= {one.id: one for one in made}
        return made

    async def _answer(self, text: str, session: Session) -> Json | None:
        """The reply to a message; None where it ends the session."""
        session.used = asyncio.get_running_loop().time()
        try:
            asked = _read(text, _Request)
            if asked.type == "close":
                return None
            if asked.type == "state":
                return {"type": "state", "data": session.state}
            if asked.type == "mcp":
                return {"type": "mcp", "data": await self._rpc(asked.data, session)}
            if asked.type not in ("reset", "step"):
                raise Refused("UNKNOWN_TYPE", f"Unknown message type: {asked.type}")
            async with session.lock:
                take = self._reset if asked.type == "reset" else self._step
                return {"type": "observation", "data": await take(session, asked.data)}
        except Refused as error:
            return self._refusal(error)

    def _refusal(self, error: Refused) -> Json:
        data: Json = {"message": str(error), "code": error.code}
        if error.code == "CAPACITY_REACHED":
            data |= {"active_sessions": len(self._sessions), "max_sessions": self._max_sessions}
        return {"type": "error", "data": data}

    async def _rpc(self, given: str | Json, session: Session | None) -> Json:
        answer: Json = {"jsonrpc": "2.0", "id": None}
        try:
            asked = _read(given, _Request)
            answer["id"] = asked.id
            return answer | {"result": await self._result(asked.method, asked.params, session)}
        except Refused as error:
            return answer | {
                "error": {"code": CODES.get(error.code, FAILED), "message": str(error)}
            }

    async def _result(self, method: str, params: Json, session: Session | None) -> Json:
        if method == "tools/list":
            return {"tools": [_listed(tool, "inputSchema") for tool in self._tools]}
        if method == "openenv/session/create":
            return {"session_id": (session or self._open(1)[0]).id}
        if method not in ("tools/call", "openenv/session/close", "openenv/session/fork"):
            raise Refused("UNKNOWN_TYPE", f"Method not found: {method}")
        id = params.get("session_id") or (session.id if session else "")
        named = self._found(id)
        if method == "openenv/session/close":
            if named.is_attached:
                raise Refused("VALIDATION_ERROR", f"session {id} has a socket: close that")
            await self._end(named)
            return {"session_id": id, "closed": True}
        async with named.lock:
            if method == "openenv/session/fork":
                return {"session_ids": await self._fork(named, params.get("count", 1))}
            call = {"tool_name": params.get("name"), "arguments": params.get("arguments", {})}
            found = await self._step(named, {"type": "call_tool", **call})
        return dict(found["observation"]["result"])

    async def _fork(self, session: Session, count: Any) -> list[str]:
        """So many sessions in the state of this one, or none."""
        env = _live(session)
        if type(count) is not int or not 1 <= count <= MAX_FORKS:
            raise Refused("VALIDATION_ERROR", f"count: expected 1 to {MAX_FORKS}, not {count!r}")
        if env.fork_mode == "none":
            raise Refused("UNKNOWN_TYPE", "this environment cannot be forked")
        made = self._open(count)  # places first, before others take them
        try:
            for one in made:
                one.env = await self._within(env.fork(), "fork")
                one.state = msgspec.structs.replace(session.state, episode_id=one.id)
        except BaseException:
            await uncancelled(self._end(*made))
            raise
        return [one.id for one in made]

    async def _reset(self, session: Session, chosen: Json) -> Json:
        asked = _read(chosen, _Reset)
        tasks = self._split(asked.split or next(iter(self._splits)))
        draw = SystemRandom() if asked.seed is None else Random(asked.seed)
        task = self._task(tasks, draw.randrange(len(tasks)) if asked.index is None else asked.index)
        await self._close(session)
        session.has_ended = False
        session.state = State(asked.episode_id or session.id, 0, task.id)
        try:
            session.env = self._make_env(task)
        except AgentEnvError as error:
            raise Refused("FACTORY_ERROR", str(error)) from error
        begun = await self._within(session.env.reset(seed=asked.seed), "reset")
        messages, info = check_reset(begun)
        self._tools = self._tools or list(info.get("tools", ()))
        return _observed({"messages": messages}, facts={"session_id": session.id})

    def _split(self, name: object) -> Sequence[Task]:
        if name not in self._splits:
            raise Refused("VALIDATION_ERROR", f"no split {name!r}; known: {[*self._splits]}")
        return self._splits[str(name)]

    def _task(self, tasks: Sequence[Task], index: Any) -> Task:
        if type(index) is not int or not 0 <= index < len(tasks):
            raise Refused("VALIDATION_ERROR", f"index {index}: there are {len(tasks)} tasks")
        return tasks[index]

    async def _step(self, session: Session, given: Any) -> Json:
        asked = _read(given, Action)
        if asked.type == "list_tools":
            return _observed({"tools": [_listed(one, "input_schema") for one in self._tools]})
        env, calls = _live(session), tuple(asked.tool_calls)
        if asked.type == "call_tool":
            calls = (ToolCall(asked.tool_name, asked.arguments),)
        turn = Message("assistant", asked.content, calls)
        if asked.limit is not None:
            last = turn if turn.content or calls else None
            given_up = await self._within(env.finish(asked.limit, last), "grade")
            reward, info = check_finish(given_up)
            return _observed({"messages": []}, reward, True, {"info": info, "truncated": True})
        taken = check_step(await self._within(env.step(turn), "step"))
        messages, reward, terminated, truncated, info = taken
        session.state.step_count += 1
        session.has_ended = terminated or truncated
        observation: Json = {"messages": messages}
        if asked.type == "call_tool":
            text = "\n".join(one.content for one in messages)
            failed = any(not one["ok"] for one in info.get("tool_calls", ()))
            result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": failed}
            observation = {"tool_name": asked.tool_name, "result": result, "error": None}
        facts = {"info": info, "truncated": truncated}
        return _observed(observation, reward, session.has_ended, facts)

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        """What an environment gives; where it does not, the session is of no use any more."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await guarded(work, f"the environment's {what}")
        except TimeoutError as error:
            raise Refused("SESSION_ERROR", f"no {what} within {self._timeout_s:g} s") from error
        except AgentEnvError as error:
            raise Refused("SESSION_ERROR", str(error)) from error

    async def _end(self, *sessions: Session) -> None:
        for session in sessions:
            self._sessions.pop(session.id, None)
        await asyncio.gather(*map(self._close, sessions))

    async def _close(self, session: Session) -> None:
        env, session.env = session.env, None
        try:
            if env is not None:
                await self._within(env.close(), "end")
        except Refused as error:
            logger.warning("%s: %s", self.name, error)

    async def _reap(self) -> None:
        """End sessions without a socket that nobody asks anything."""
        while True:
            await asyncio.sleep(min(self._idle_s, 60.0))
            oldest = asyncio.get_running_loop().time() - self._idle_s
            sessions = [one for one in self._sessions.values() if not one.is_attached]
            await self._end(*(one for one in sessions if one.used < oldest and one.env is not None))


def _live(session: Session) -> Env:
    if session.env is None or session.has_ended:
        why = "the episode has ended" if session.has_ended else "there was no reset"
        raise Refused("EXECUTION_ERROR", why)
    return session.env


def _read(given: Any, kind: type[Any]) -> Any:
    try:
        return decode(given, kind) if isinstance(given, str) else convert(given, kind)
    except ForeignError as error:
        raise Refused("VALIDATION_ERROR", f"Invalid message: {error}") from error


async def _body(http: web.Request) -> str:
    async with asyncio.timeout(SEND_S):
        return await http.text()


def _observed(
    observation: Json, reward: float | None = None, done: bool = False, facts: Json | None = None
) -> Json:
    observation = {**observation, "metadata": facts or {}}
    return {"observation": observation, "reward": reward, "done": done}


def _named(task: Task) -> Json:
    return {"id": task.id, "question": task.question, "kind": task.kind}


def _listed(tool: Json, schema: str) -> Json:
    return {"name": tool["name"], "description": tool["description"], schema: tool["parameters"]}


def _page(body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(http: web.Request) -> web.Response:
        return _json(body)

    return page


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoded(body), status=status, content_type="application/json")


def _encoded(body: Any) -> bytes:
    return msgspec.json.encode(body, enc_hook=str)


async def _send(ws: web.WebSocketResponse, answer: Json) -> None:
    async with asyncio.timeout(SEND_S):
        await ws.send_str(_encoded(answer).decode())
