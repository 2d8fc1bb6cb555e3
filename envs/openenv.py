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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from agentenv.call_syntax import after_thoughts
from agentenv.data_files import Row
from agentenv.deadline import uncancelled, waiting
from agentenv.env import ForkMode, StepResult, shared
from agentenv.envs.mcp_tools import expanded, text_of_json
from agentenv.errors import ConfigError, DataError, EnvError, ForeignError, InfraError, ToolError
from agentenv.http import fetch
from agentenv.offload import in_thread
from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool, inlined
from agentenv.types import Info, Limit, Message, Task, ToolResult
from agentenv.untrusted import convert, decode

KEY = "openenv"  # of Task.metadata: the arguments of its reset
SIZE, HELD_OUT_SEED = 10_000, 1_000_000_000  # of rows that are seeds
PAGE = 1000  # tasks asked for at a time
NUM_MEASURED = 8  # replays, before their rate counts
STEP = "step"  # the tool of a typed action; OpenEnv reserves the name
SESSION = "openenv session"  # the tool, unknown to the policy, whose state the others share

Json = dict[str, Any]
_NO_GRADER: Any = None
Begun = tuple[list[Message], Info]


class _Reply(Struct):
    type: str
    data: Json


class _Found(Struct):
    observation: Json
    reward: float | bool | None = None
    done: bool = False


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
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        success: float = 1.0,
        forks: bool = True,
    ) -> None:
        key = ("openenv", url, tuple(sorted((headers or {}).items())), timeout_s, forks)
        self.server = shared(key, lambda: Server(url, headers or {}, timeout_s, forks))
        self.success = success
        super().__init__(task, [self.server], _NO_GRADER, tool_timeout_s=2 * timeout_s)

    @property
    def fork_mode(self) -> ForkMode:
        """That of the server."""
        return self.server.fork_mode

    async def reset(self, *, seed: int | None = None, options: Json | None = None) -> Begun:
        messages, info = await super().reset(seed=seed, options=options)
        chosen = {} if seed is None else {"seed": seed}
        observation = await self._session("reset").begin(chosen | self.task.metadata.get(KEY, {}))
        info["tools"] = [tool for tool in info["tools"] if tool["name"] != SESSION]
        if own := _messages(observation):
            return own, info
        last, text = messages[-1], _shown(observation)
        messages[-1] = Message(last.role, f"{last.content}\n\n{text}" if text else last.content)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; rewards, and the end, are the server's."""
        session, says = self._session("step"), self.server.says
        if ended := session.has_ended:
            raise EnvError(f"task {self.task.id}: step after the end of the episode")
        if self.server.takes_turns:
            return session.turned(await session.step(_turn(action)))
        taken: StepResult = ([], 0.0, False, False, {})
        if says and not action.tool_calls:
            self._written.append(action)
            try:
                text = _shown(await session.step({says: after_thoughts(action.content).strip()}))
            except ToolError as error:
                text = str(error)
            taken[0].append(Message("user", text))
        else:
            taken = await super().step(action)
        messages, _, ended, cut, info = taken
        if session.has_ended or ended or cut:
            return [], session.take(), not cut, cut, info | self._judged(session)
        return messages, session.take(), False, False, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        session = self._session("finish")
        if not self.server.takes_turns:
            return session.take(), self._judged(session)
        turn = _turn(action) if action else {}
        _, reward, _, _, info = session.turned(await session.step({**turn, "limit": reason}))
        return reward, info

    async def _grade(self, written: Sequence[Message]) -> tuple[float, Info]:
        """The server's rewards are all that there are."""
        return 0.0, {}

    def _session(self, what: str) -> Session:
        session = self._open_states(what).get(SESSION)
        if not isinstance(session, Session):
            raise ConfigError("env.tools: the tools of OpenEnv-v0 are the server's; take it out")
        return session

    def _judged(self, session: Session) -> Info:
        return {"success": session.total >= self.success, "parts": {}, "reason": ""}


class SessionTool(StatelessTool):
    """The session of the episode, for its tools; the policy cannot call it."""

    name, description = SESSION, ""

    def __init__(self, server: Server) -> None:
        self.schema, self.server = {}, server

    def start(self, seed: int | None) -> Session:
        return Session(self.server)

    async def call(self, arguments: Json, state: Session) -> ToolResult:
        raise ToolError(f"There is no tool {SESSION!r}.")

    async def fork(self, state: Session) -> Session:
        return await state.copy()

    async def close(self, state: Session) -> None:
        await state.close()


class OpenEnvTool(StatelessTool):
    """One tool of a server."""

    state_of = SESSION

    def __init__(self, given: Json) -> None:
        self.name, self.description = given["name"], given.get("description") or ""
        self.schema = given.get("inputSchema") or given.get("input_schema") or {}

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
        self.tools: list[StatelessTool] = []
        self.num_open, self.most, self.freed = 0, 1 << 30, asyncio.Event()  # sessions
        self.num_replays = self.num_refused = 0
        self._lock = asyncio.Lock()
        connector = aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(connector=connector, headers=self.headers)

    @property
    def fork_mode(self) -> ForkMode:
        """Replays, unless the server forks, as long as half of them answer as the first time."""
        if self.can_fork:
            return "snapshot"
        differs = self.num_replays >= NUM_MEASURED and 2 * self.num_refused > self.num_replays
        return "none" if differs or not self.forks else "replay"

    async def load(self) -> list[StatelessTool]:
        """The tools. Asks once for version, action and tools; raises ConfigError."""
        async with self._lock:
            if not self.tools:
                await self._ask()
        return self.tools

    async def _ask(self) -> None:
        try:
            api, schema = await self.asked("/openapi.json"), await self.asked("/schema")
            listed = await self.asked("/mcp", _rpc("tools/list"))
            version, action = str(api["info"]["version"]), schema["action"]
            tools = listed.get("result", {}).get("tools", ())
        except (DataError, TypeError, KeyError, AttributeError) as error:
            text = f"no server of OpenEnv 1.x is at {self.url}: {error}; start it, or mend the url"
            raise ConfigError(text) from error
        if not version.startswith("1."):
            raise ConfigError(f"{self.url}: expected OpenEnv of version 1.x, got {version}")
        self.can_fork = self.forks and "fork" in api["info"].get("x-openenv-capabilities", ())
        action = inlined(action, action.get("$defs", {}), ())
        fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        self.takes_turns = {"content", "tool_calls"} <= fields.keys()
        if fields and "tool_name" not in fields:
            needs, about = action.get("required", []), action.get("description", "One action.")
            is_text = len(needs) == 1 and fields[needs[0]].get("type") == "string"
            self.says = needs[0] if is_text else ""
            schema = {"type": "object", "properties": fields, "required": needs}
            tools = [{"name": STEP, "description": about, "inputSchema": schema}]
        self.tools = [SessionTool(self), *map(OpenEnvTool, tools)]

    async def asked(self, path: str, body: Json | None = None) -> Any:
        """An answer by HTTP. Raises DataError."""
        return await in_thread(fetch, self.url + path, self.headers, body)

    def stats(self) -> dict[str, float]:
        """Replays, and those that differed."""
        counts = {"num_replays": self.num_replays, "num_replays_refused": self.num_refused}
        return {f"openenv/{name}": float(count) for name, count in counts.items()}

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self.http.close()


class Session:
    """A WebSocket, whose answers come in the order of the requests: what is cut off ends it, since
    an answer that nobody has read would answer the next request."""

    def __init__(self, server: Server) -> None:
        self.server, self.has_ended, self.total = server, False, 0.0
        self._record: list[tuple[str, Json, _Found]] = []
        self._reward, self._id, self._problem = 0.0, "", "it has not begun"
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._has_place = False

    async def begin(self, chosen: Json, waits: bool = True) -> Json:
        """Open the session and reset it; it is waited for while all are in use here. Raises
        EnvError, and InfraError without a session."""
        while waits and self.server.num_open >= self.server.most:
            self.server.freed.clear()
            with waiting(f"a session of {self.server.url}"):
                await self.server.freed.wait()
        await self._connect("")
        if self.server.can_fork:
            created = await self._send("mcp", _rpc("openenv/session/create"))
            self._id = created["result"]["session_id"]
        return await self._take("reset", chosen)

    async def step(self, action: Json) -> Json:
        """The observation. Raises ToolError for an action that the server refuses, EnvError for a
        lost session."""
        if self.has_ended:
            raise ToolError("The episode has ended.")
        return await self._take("step", action)

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
                made = await self.server.asked("/mcp", asked)
                await other._connect(made["result"]["session_ids"][0])
            else:
                await other._replay(self._record)
        except BaseException as error:
            await uncancelled(other.close())
            if isinstance(error, DataError | ToolError | LookupError | InfraError):
                raise EnvError(f"{self.server.url}: a session is not copied: {error}") from error
            raise
        other._record, other.total, other._reward = [*self._record], self.total, self._reward
        return other

    async def close(self) -> None:
        """End the session; idempotent."""
        ws, self._ws, self._problem = self._ws, None, "it is closed"
        self.server.num_open -= self._has_place
        self._has_place = False
        self.server.freed.set()
        if ws is not None:
            await ws.close()  # it waits for ten seconds

    async def _replay(self, record: list[tuple[str, Json, _Found]]) -> None:
        self.server.num_replays += 1
        self.server.num_refused += 1  # until it is done
        await self.begin(record[0][1], waits=False)
        for kind, data, _ in record[1:]:
            await self._take(kind, data)
        if self._record != record:
            raise EnvError(f"{self.server.url}: a replay answered otherwise than the first time")
        self.server.num_refused -= 1

    async def _connect(self, made: str) -> None:
        server = self.server
        server.num_open, self._has_place = server.num_open + 1, True
        address = f"{server.url}/ws?session_id={made}" if made else f"{server.url}/ws"
        try:
            async with asyncio.timeout(server.timeout_s):
                self._ws = await server.http.ws_connect(address, max_msg_size=0)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfraError(f"{server.url}: no session: {type(error).__name__} {error}") from error
        self._id, self._problem = made, ""

    async def _take(self, kind: str, data: Json) -> Json:
        found = convert(await self._send(kind, data), _Found)
        self._reward += found.reward or 0.0
        self.total += found.reward or 0.0
        self.has_ended = found.done
        self._record.append((kind, data, found))
        return found.observation

    async def _send(self, kind: str, data: Json) -> Json:
        """The data of the answer."""
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
        except (aiohttp.ClientError, TimeoutError, OSError, ForeignError) as error:
            within = f"within {self.server.timeout_s:g} s"
            raise EnvError(
                f"{where}: {type(error).__name__} at a {kind} {within}: {error}"
            ) from error
        said, code = str(reply.data.get("message")), reply.data.get("code")
        if reply.type == "error" and code == "CAPACITY_REACHED":
            self.server.most = max(1, int(reply.data.get("max_sessions") or 1))
            raise InfraError(f"{self.server.url}: {said}")
        if reply.type == "error" and (kind != "step" or code == "SESSION_ERROR"):
            raise EnvError(f"{self.server.url}: {kind}: {said}")
        self._problem = ""
        if reply.type == "error":
            wrong = [f"{one.get('loc')}: {one.get('msg')}" for one in reply.data.get("errors", ())]
            raise ToolError("; ".join([said, *wrong]))
        return reply.data


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
    if failure := "tool_name" in observation and observation.get("error"):
        failed = InfraError if failure.get("error_type") == "transport_error" else ToolError
        raise failed(str(failure.get("message")))
    if "tool_name" in observation:
        return text_of_json(observation.get("result"))
    fields = {key: value for key, value in observation.items() if key != "metadata"}
    said = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    return text_of_json(said or observation.get("metadata") or "")


def rows(url: str, options: Mapping[str, Any], *, held_out: bool) -> Iterator[Row]:
    """The tasks of a server, or seeds where it lists none. `options`: split (else "train", or
    "test" for those held out), size, seed, question (in place of the server's own), headers. Raises
    DataError."""
    url = re.sub(r"\A(https?:)/+", r"\1//", url).rstrip("/")  # of which a path keeps one
    known = ("split", "size", "seed", "question", "headers")
    if unknown := sorted(options.keys() - set(known)):
        raise DataError(f"openenv:{url}: source has no {unknown}; it takes {', '.join(known)}")
    headers, _ = expanded("source", "headers", options.get("headers"))
    name = (fetch(f"{url}/list_environments", headers) or ["openenv"])[0]
    splits = [one["name"] for one in fetch(f"{url}/{name}/splits", headers) or ()]
    if not splits:
        about = (fetch(f"{url}/metadata", headers) or {}).get("description")
        first = options.get("seed", HELD_OUT_SEED if held_out else 0)
        for seed in range(first, first + options.get("size", SIZE)):
            yield _row(f"seed-{seed}", options.get("question") or about, name, {"seed": seed})
        return
    split = options.get("split", "test" if held_out else "train")
    if split not in splits:
        raise DataError(f"openenv:{url}: no split {split!r}; source.split is one of {splits}")
    number = fetch(f"{url}/{name}/num_tasks", headers, {"split": split})["num_tasks"]
    number = min(number, options.get("size", number))
    for start in range(0, number, PAGE):
        page = {"split": split, "start": start, "stop": min(number, start + PAGE)}
        tasks = fetch(f"{url}/{name}/task_range", headers, page)["tasks"]
        for index, task in enumerate(tasks, start):
            held = task if isinstance(task, dict) else {"question": str(task)}
            id = str(held.get("id", f"{split}-{index}"))
            said = options.get("question") or held.get("question") or held.get("prompt") or id
            yield _row(id, said, held.get("kind", split), {"split": split, "index": index})


def _row(id: str, question: object, kind: str, chosen: Json) -> Row:
    answer = "one that the server rewards"
    return {"id": id, "question": str(question), "answer": answer, "kind": kind, KEY: chosen}
