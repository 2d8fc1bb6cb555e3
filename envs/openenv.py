"""The environment `agentenv/OpenEnv-v0`: a server of OpenEnv (1.x), whatever it serves.

    [env]
    id = "agentenv/OpenEnv-v0"
    kwargs = { url = "http://127.0.0.1:8000" }
    # kwargs = { url = "https://..", headers = { Authorization = "Bearer ${MY_TOKEN}" } }

    [data]
    train = "openenv:http://127.0.0.1:8000"    # its tasks, or seeds where it has none
    source = { size = 1000 }

An episode is a session of its own. Its tools are those of the server; a typed action is one tool,
`step`, and where it is a single text, a turn without a call is that text. What the reset shows
follows the question in the prompt, or is the prompt where it holds messages. Rewards are the
server's, step by step. The server is trusted code.

A server that declares it can forks (docs/openenv.md). Else a fork is a replay, each answer of which
is compared with the first one, and where most replays differ there are roots only. A session that
is lost, or answers too late, fails its step; the rollout leads a fresh one to the same place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError

import msgspec
from msgspec import Struct

from agentenv.call_syntax import after_thoughts
from agentenv.data_files import Row
from agentenv.deadline import uncancelled, waiting
from agentenv.env import ForkMode, Grade, StepResult, shared
from agentenv.envs.mcp_tools import expanded
from agentenv.errors import ConfigError, DataError, EnvError, ForeignError, InfraError, ToolError
from agentenv.offload import in_thread
from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool, inlined
from agentenv.types import Info, Limit, Message, Task, ToolResult
from agentenv.untrusted import convert, decode

if TYPE_CHECKING:
    import aiohttp

KEY = "openenv"  # of Task.metadata: the arguments of its reset
SIZE, HELD_OUT_SEED = 10_000, 1_000_000_000  # of rows that are seeds
PAGE = 1000  # tasks asked for at a time
HTTP_S, CLOSE_S = 30.0, 5.0
NUM_MEASURED = 8  # replays, before their rate counts
STEP = "step"  # the tool of a typed action; OpenEnv reserves the name

Json = dict[str, Any]

logger = logging.getLogger(__name__)


class _Reply(Struct):
    type: str
    data: Json


class _Found(Struct):
    observation: Json
    reward: float | bool | None = None
    done: bool = False


class FullError(InfraError):
    """The server has no session left."""


class OpenEnv(ToolEnv):
    """One session of the server at `url`.

    `headers` go with each request, "${NAME}" in them being a variable of this process. No answer
    may take over `timeout_s`. Unless the server says whether an episode went right, it did from the
    sum of rewards `success` on. `forks = false`: roots only.
    """

    def __init__(
        self,
        task: Task,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        success: float = 1.0,
        forks: bool = True,
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise ConfigError(f"OpenEnv: url {url!r}: expected http://HOST:PORT or https://HOST")
        key = ("openenv", url, tuple(sorted((headers or {}).items())), timeout_s, forks)
        self.server = shared(key, lambda: Server(url, headers or {}, timeout_s, forks))
        self.success = success
        self._session: Session | None = None
        super().__init__(task, [self.server], _NoGrader(), tool_timeout_s=2 * timeout_s)

    @property
    def fork_mode(self) -> ForkMode:
        """That of the server."""
        return self.server.fork_mode

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        await self._leave()
        messages, info = await super().reset(seed=seed, options=options)
        session = self._hold(Session(self.server))
        chosen = {} if seed is None else {"seed": seed}
        observation = await session.begin(chosen | (self.task.metadata.get(KEY) or {}))
        if own := _messages(observation):
            return own, {**info, "tools": self.server.schemas}
        last, text = messages[-1], _shown(observation)
        messages[-1] = Message(last.role, f"{last.content}\n\n{text}" if text else last.content)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; rewards, and the end, are the server's."""
        session, says = self._of("step"), self.server.says
        if session.has_ended:
            raise EnvError(f"task {self.task.id}: step after the end of the episode")
        said = after_thoughts(action.content).strip()
        if self.server.takes_turns:
            return session.turned(await session.step(_turn(action)))
        if says and said and not action.tool_calls:
            self._written.append(action)
            text = _shown(await session.step({says: said}))
            taken: StepResult = ([Message("user", text)], 0.0, False, False, {})
        else:
            taken = await super().step(action)
        messages, reward, ended, cut, info = taken
        ended = ended or session.is_over()
        info |= self._judged() if ended or cut else {}
        return [] if ended else messages, reward + session.take(), ended, cut, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        session = self._of("finish")
        if not self.server.takes_turns:
            return session.take(), self._judged()
        turn = _turn(action) if action else {}
        _, reward, _, _, info = session.turned(await session.step({**turn, "limit": reason}))
        return reward, info

    async def fork(self) -> Self:
        session = await self._of("fork").copy()
        try:
            other = await super().fork()
        except BaseException:
            await uncancelled(session.close())
            raise
        other._hold(session)
        return other

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await uncancelled(self._leave())

    def _of(self, what: str) -> Session:
        self._open_states(what)
        assert self._session is not None
        return self._session

    def _hold(self, session: Session) -> Session:
        """The session is that of this episode, and its tools are called in it."""
        self._session, session.owner = session, self
        states = self._open_states("call")
        states |= {one.name: session for one in self.server.tools if one.name in states}
        return session

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.owner is self:  # else of a fork that failed
            await session.close()

    def _judged(self) -> Info:
        return {"success": self._of("end").total >= self.success, "parts": {}, "reason": ""}


class _NoGrader:
    async def grade(self, *_: Any) -> Grade:
        return Grade(0.0, False)


class OpenEnvTool(StatelessTool):
    """One tool of a server; it is called in the session of the episode."""

    def __init__(self, server: Server, schema: Json) -> None:
        self.name, self.description = schema["name"], schema["description"]
        self.schema, self._server = schema["parameters"], server

    @property
    def fork_mode(self) -> ForkMode:  # type: ignore[override]
        """That of the server."""
        return self._server.fork_mode

    async def call(self, arguments: Json, state: Session) -> ToolResult:
        """Raises ToolError with the server's text."""
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        return ToolResult(_shown(await state.step(arguments if self.name == STEP else call)))


class Server:
    """What the sessions of a server share, and the source of their tools."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, forks: bool) -> None:
        self.url, self.timeout_s, self.forks = url.rstrip("/"), timeout_s, forks
        self.headers, _ = expanded("OpenEnv", "headers", headers)
        self.takes_turns = self.can_fork = False
        self.says = ""  # the field of an action that is a single text
        self.schemas: list[Json] = []
        self.tools: list[OpenEnvTool] = []
        self.num_open, self.most = 0, 1 << 30  # sessions
        self.num_replays = self.num_refused = 0
        self.freed, self._lock, self._is_known = asyncio.Event(), asyncio.Lock(), False
        self._http: aiohttp.ClientSession | None = None

    @property
    def fork_mode(self) -> ForkMode:
        """Replays, unless the server forks, as long as half of them answer as the first time."""
        if self.can_fork:
            return "snapshot"
        differs = self.num_replays >= NUM_MEASURED and 2 * self.num_refused > self.num_replays
        return "none" if differs or not self.forks else "replay"

    async def load(self) -> list[OpenEnvTool]:
        """The tools. Asks once for version, action and tools; raises ConfigError."""
        async with self._lock:
            if not self._is_known:
                await self._ask()
                self._is_known = True
        return [] if self.takes_turns else self.tools

    async def _ask(self) -> None:
        listing = _rpc("tools/list")
        try:
            api, schema, listed = [
                await in_thread(_asked, self.url, path, self.headers, body)
                for path, body in (("/openapi.json", None), ("/schema", None), ("/mcp", listing))
            ]
            version, action = str(api["info"]["version"]), schema["action"]
            if not version.startswith("1."):
                raise ConfigError(f"OpenEnv: {self.url}: expected version 1.x, got {version}")
        except DataError as error:
            raise ConfigError(f"{error}; start the server, or mend env.kwargs.url") from error
        except (TypeError, KeyError) as error:
            raise ConfigError(f"OpenEnv: {self.url} is no server of OpenEnv 1.x") from error
        self.can_fork = self.forks and "fork" in api["info"].get("x-openenv-capabilities", ())
        action = inlined(action, action.get("$defs", {}), ())
        fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        self.takes_turns = {"content", "tool_calls"} <= fields.keys()
        if fields and "tool_name" not in fields:
            needs = action.get("required", [])
            is_text = len(needs) == 1 and fields[needs[0]].get("type") == "string"
            self.says = needs[0] if is_text else ""
            schema = {"type": "object", "properties": fields, "required": needs}
            about = action.get("description", "One action.")
            self.schemas = [{"name": STEP, "description": about, "parameters": schema}]
        else:
            self.schemas = [
                {
                    "name": one["name"],
                    "description": one.get("description") or "",
                    "parameters": one.get("inputSchema") or one.get("input_schema") or {},
                }
                for one in (listed or {}).get("result", {}).get("tools", ())
            ]
        self.tools = [OpenEnvTool(self, one) for one in self.schemas]

    def http(self) -> aiohttp.ClientSession:
        """The connections."""
        if self._http is None:
            import aiohttp

            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(connector=connector, headers=self.headers)
        return self._http

    def stats(self) -> dict[str, float]:
        """Replays, and those that differed."""
        counts = {"num_replays": self.num_replays, "num_replays_refused": self.num_refused}
        return {f"openenv/{name}": float(count) for name, count in counts.items()}

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._http is not None:
            await self._http.close()


class Session:
    """A WebSocket, whose answers come in the order of the requests: what is cut off ends it, since
    an answer that nobody has read would answer the next request."""

    def __init__(self, server: Server) -> None:
        self.server, self.owner = server, object()
        self.record: list[tuple[str, Json, _Found]] = []
        self.total, self._reward, self.has_ended = 0.0, 0.0, False
        self._id, self._problem, self._has_place = "", "it has not begun", False
        self._ws: aiohttp.ClientWebSocketResponse | None = None

    async def begin(self, chosen: Json, *, waits: bool = True) -> Json:
        """Open the session and reset it; it is waited for while all are in use here. Raises
        EnvError, and InfraError without a session."""
        while True:
            await self._connect("", waits)
            try:
                return await self._take("reset", chosen)
            except FullError:
                await self.close()
                if not waits or self.server.num_open < self.server.most:
                    raise

    async def step(self, action: Json) -> Json:
        """The observation. Raises ToolError for an action that the server refuses, EnvError for a
        lost session."""
        if self.has_ended:
            raise ToolError("The episode has ended.")
        return await self._take("step", action)

    def is_over(self) -> bool:
        """Whether the server has ended the episode."""
        return self.has_ended

    def take(self) -> float:
        """The rewards since they were last taken."""
        reward, self._reward = self._reward, 0.0
        return reward

    def turned(self, observation: Json) -> StepResult:
        """The step of a server that takes turns."""
        facts = observation.get("metadata") or {}
        cut, info = bool(facts.get("truncated")), dict(facts.get("info") or {})
        return _messages(observation), self.take(), self.has_ended and not cut, cut, info

    async def copy(self) -> Session:
        """An independent session in the same state. Raises EnvError."""
        other = Session(self.server)
        try:
            if self.server.can_fork:
                asked = _rpc("openenv/session/fork", session_id=self._id, count=1)
                post = in_thread(_asked, self.server.url, "/mcp", self.server.headers, asked)
                await other._connect((await post)["result"]["session_ids"][0], False)
            else:
                await other._replay(self.record)
        except BaseException as error:
            await uncancelled(other.close())
            if not isinstance(error, InfraError | ToolError | LookupError):
                raise
            raise EnvError(f"{self.server.url}: a session is not copied: {error}") from error
        other.record, other.total, other._reward = list(self.record), self.total, self._reward
        return other

    async def close(self) -> None:
        """End the session; idempotent."""
        ws, self._ws, self._problem = self._ws, None, "it is closed"
        has_place, self._has_place = self._has_place, False
        try:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(CLOSE_S):
                    if ws is not None:
                        await ws.close()
        finally:
            self.server.num_open -= has_place
            self.server.freed.set()

    async def _replay(self, record: list[tuple[str, Json, _Found]]) -> None:
        self.server.num_replays += 1
        self.server.num_refused += 1  # until it is done
        await self.begin(record[0][1], waits=False)
        for kind, data, _ in record[1:]:
            await self._take(kind, data)
        if self.record != record:
            raise EnvError(f"{self.server.url}: a replay answered otherwise than the first time")
        self.server.num_refused -= 1

    async def _connect(self, made: str, waits: bool) -> None:
        import aiohttp

        server = self.server
        while waits and server.num_open >= server.most:
            server.freed.clear()
            with waiting(f"a session of {server.url}"):
                await server.freed.wait()
        server.num_open, self._has_place = server.num_open + 1, True
        address = f"{server.url}/ws" + (f"?session_id={made}" if made else "")
        try:
            async with asyncio.timeout(server.timeout_s):
                self._ws = await server.http().ws_connect(address, max_msg_size=0)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self.close()
            raise InfraError(f"{server.url}: no session: {type(error).__name__} {error}") from error
        self._id, self._problem = made, ""
        if server.can_fork and not made:
            created = await self._send("mcp", _rpc("openenv/session/create"))
            self._id = created["result"]["session_id"]

    async def _take(self, kind: str, data: Json) -> Json:
        found = convert(await self._send(kind, data), _Found)
        self._reward += found.reward or 0.0
        self.total += found.reward or 0.0
        self.has_ended = found.done
        self.record.append((kind, data, found))
        return found.observation

    async def _send(self, kind: str, data: Json) -> Json:
        """The data of the answer."""
        import aiohttp

        where = f"{self.server.url}: the session is lost"
        if self._problem or self._ws is None:
            raise EnvError(f"{where}: {self._problem}")
        self._problem = f"a {kind} was cut off"
        try:
            async with asyncio.timeout(self.server.timeout_s):
                await self._ws.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
                message = await self._ws.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise EnvError(f"{where}: the server ended it at a {kind}")
            reply = decode(message.data, _Reply)
        except TimeoutError as error:
            raise EnvError(f"{where}: no answer within {self.server.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ForeignError) as error:
            raise EnvError(f"{where}: {type(error).__name__}: {error}") from error
        if reply.type != "error":
            self._problem = ""
            return reply.data
        said, code = f"{self.server.url}: {reply.data.get('message')}", reply.data.get("code")
        if code == "CAPACITY_REACHED":
            self.server.most = max(1, int(reply.data.get("max_sessions") or 1))
            raise FullError(said)
        if kind != "step" or code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise EnvError(f"{kind}: {said}")
        self._problem = ""
        raise ToolError(str(reply.data.get("message")))


def _rpc(method: str, **params: Any) -> Json:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def _turn(action: Message) -> Json:
    return {"content": action.content, "tool_calls": action.tool_calls}


def _messages(observation: Json) -> list[Message]:
    """The messages of an observation that is made of such."""
    try:
        return convert(observation.get("messages") or [], list[Message])
    except ForeignError:  # they have another form, such as those of games
        return []


def _shown(observation: Json) -> str:
    """What the policy reads: a text as it is, else JSON. Raises ToolError for a call that failed,
    and InfraError where the server could not make it."""
    if "tool_name" not in observation:
        fields = {key: value for key, value in observation.items() if key != "metadata"}
        said = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
        return _text(said or observation.get("metadata") or "")
    failure, result = observation.get("error"), observation.get("result")
    if failure:
        failed = InfraError if failure.get("error_type") == "transport_error" else ToolError
        raise failed(str(failure.get("message")))
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return _text(result)
    blocks = [one.get("text") or f"[{one.get('type')}]" for one in result["content"]]
    if result.get("is_error"):
        raise ToolError("\n".join(blocks) or "The tool failed.")
    return "\n".join(blocks) or _text(result.get("structured_content") or "")


def _text(value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def rows(url: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Row]:
    """The tasks of a server, or seeds where it lists none. `options`: split (else "train", or
    "test" for those held out), size, seed, question (in place of the server's own), headers. Raises
    DataError."""
    url = re.sub(r"\A(https?:)/+", r"\1//", url).rstrip("/")  # of which a path keeps one
    known = ("split", "size", "seed", "question", "headers")
    if unknown := sorted(options.keys() - set(known)):
        raise DataError(f"openenv:{url}: source has no {unknown}; it takes {', '.join(known)}")
    headers, _ = expanded("source", "headers", options.get("headers"))
    name = (_asked(url, "/list_environments", headers) or ["openenv"])[0]
    splits = [one["name"] for one in _asked(url, f"/{name}/splits", headers) or ()]
    if not splits:
        about = (_asked(url, "/metadata", headers) or {}).get("description")
        first = options.get("seed", HELD_OUT_SEED if held_out else 0)
        for seed in range(first, first + options.get("size", SIZE)):
            yield _row(f"seed-{seed}", options.get("question") or about, name, {"seed": seed})
        return
    split = options.get("split", "test" if held_out else "train")
    if split not in splits:
        raise DataError(f"openenv:{url}: no split {split!r}; source.split is one of {splits}")
    number = _asked(url, f"/{name}/num_tasks", headers, {"split": split})["num_tasks"]
    number = min(number, options.get("size", number))
    for start in range(0, number, PAGE):
        page = {"split": split, "start": start, "stop": min(number, start + PAGE)}
        tasks = _asked(url, f"/{name}/task_range", headers, page)["tasks"]
        for index, task in enumerate(tasks, start):
            held = task if isinstance(task, dict) else {"question": str(task)}
            id = str(held.get("id", f"{split}-{index}"))
            said = options.get("question") or held.get("question") or held.get("prompt") or id
            yield _row(id, said, held.get("kind", split), {"split": split, "index": index})


def _row(id: str, question: object, kind: str, chosen: Json) -> Row:
    answer = "one that the server rewards"
    return {"id": id, "question": str(question), "answer": answer, "kind": kind, KEY: chosen}


def _asked(url: str, path: str, headers: Mapping[str, str], body: Json | None = None) -> Any:
    """The answer; None where the server has no such route. Raises DataError."""
    data = None if body is None else msgspec.json.encode(body)
    sent = {"Content-Type": "application/json", **headers}
    try:
        request = urllib.request.Request(url + path, data, sent)
        with urllib.request.urlopen(request, timeout=HTTP_S) as response:
            return decode(response.read())
    except HTTPError as error:
        if error.code in (404, 405, 501):
            return None
        raise DataError(f"OpenEnv: {url}{path}: HTTP {error.code}") from error
    except (OSError, ValueError, ForeignError) as error:
        raise DataError(f"OpenEnv: no server answers at {url}: {path}: {error}") from error
