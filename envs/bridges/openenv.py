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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from agentenv.base.deadline import uncancelled, waiting
from agentenv.base.errors import (
    ConfigError,
    DataError,
    EnvError,
    ForeignError,
    InfraError,
    ToolError,
    reported_as,
)
from agentenv.base.types import Info, Limit, Message, Task, ToolResult
from agentenv.base.untrusted import convert
from agentenv.contract.env import ForkMode, StepResult, shared
from agentenv.contract.function_tool import inlined
from agentenv.contract.http import JsonSocket
from agentenv.contract.http_client import fetch, fetched
from agentenv.contract.http_session import HttpSession
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.bridges.mcp_tools import expanded, text_of_json
from agentenv.text.call_syntax import without_thoughts
from agentenv.text.control_tokens import KNOWN, broken

KEY = "openenv"  # in Task.metadata: the arguments of the reset
SIZE, HELD_OUT_SEED, PAGE = 10_000, 1_000_000_000, 100  # of seeds; tasks per request
NUM_MEASURED = 4  # episodes with equal replays before forks by replay
STEP = "step"  # the tool of a typed action; OpenEnv reserves the name
SESSION = "openenv session"  # a hidden tool whose state the others share

Json = dict[str, Any]
Begun = tuple[list[Message], Info]


class _Found(Struct):
    observation: Json = {}
    reward: float | bool | None = None
    done: bool = False
    message: str = ""
    code: str | int = ""
    errors: list[Json] = []
    max_sessions: int = 1


class _Reply(Struct):
    type: str
    data: _Found


Record = list[tuple[str, Json, _Found]]  # requests and their answers


class OpenEnv(ToolEnv):
    """One session of the server at `url`.

    Each request has `headers`, in which "${NAME}" is an environment variable. An answer may take
    `timeout_s` seconds at most. Unless the server reports success, an episode with a sum of rewards
    of at least `success` succeeded.
    """

    def __init__(
        self,
        task: Task,
        url: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        success: float = 1.0,
    ) -> None:
        key = ("openenv", url, tuple(sorted((headers or {}).items())), timeout_s)
        self.server = shared(key, lambda: OpenEnvServers(url, headers or {}, timeout_s))
        self.success = success
        super().__init__(task, [self.server], tool_timeout_s=2 * timeout_s)

    @property
    def fork_mode(self) -> ForkMode:
        """The server's mode."""
        return self.server.fork_mode

    async def reset(self, *, seed: int | None = None, options: Json | None = None) -> Begun:
        messages, info = await super().reset(seed=seed, options=options)
        chosen = {} if seed is None else {"seed": seed}
        observation = await self._session("reset").begin(chosen | self.task.metadata.get(KEY, {}))
        info["tools"] = [tool for tool in info["tools"] if tool["name"] != SESSION]
        if own := _messages(observation):
            return own, info
        last, text = messages[-1], broken(KNOWN, _shown(observation), counted=True)
        messages[-1] = Message(last.role, f"{last.content}\n\n{text}" if text else last.content)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; the server determines rewards and end."""
        session, text_key = self._session("step"), self.server.text_key
        if ended := session.has_ended:
            raise EnvError(f"task {self.task.id}: step after the end of the episode")
        if self.server.takes_turns:
            return session.turned(await session.take(_turn(action)))
        taken: StepResult = ([], 0.0, False, False, {})
        if text_key and not action.tool_calls:
            try:
                text = _shown(
                    await session.take({text_key: without_thoughts(action.content).strip()})
                )
            except ToolError as error:
                text = str(error)
            taken[0].append(Message("user", text))
        else:
            taken = await super().step(action)
        messages, _, ended, cut, info = taken
        if session.has_ended or ended or cut:
            await self.server.measure(session)
            return [], session.new_reward(), not cut, cut, info | self._judged(session)
        return messages, session.new_reward(), False, False, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        session, turn = self._session("finish"), _turn(action) if action else {}
        if self.server.takes_turns:
            _, reward, _, _, info = session.turned(await session.take({**turn, "limit": reason}))
            return reward, info
        await self.server.measure(session)
        return session.new_reward(), self._judged(session)

    async def _grade(self, written: Sequence[Message]) -> tuple[float, Info]:
        """The sum of the server's rewards."""
        return 0.0, {}

    def _session(self, what: str) -> OpenEnvSession:
        session = self._open_states(what).get(SESSION)
        if not isinstance(session, OpenEnvSession):
            raise ConfigError("env.tools: OpenEnv-v0 uses the server's tools; remove it")
        return session

    def _judged(self, session: OpenEnvSession) -> Info:
        return {"success": _reward(session.record) >= self.success, "parts": {}, "reason": ""}


class SessionTool(StatelessTool):
    """The session of the episode, for its tools; hidden from the policy."""

    name, description = SESSION, ""

    def __init__(self, server: OpenEnvServers) -> None:
        self.schema, self.server = {}, server

    def start(self, seed: int | None) -> OpenEnvSession:
        return OpenEnvSession(self.server)

    async def call(self, arguments: Json, state: OpenEnvSession) -> ToolResult:
        raise ToolError(f"There is no tool {SESSION!r}.")

    async def fork(self, state: OpenEnvSession) -> OpenEnvSession:
        return await state.copy()

    async def close(self, state: OpenEnvSession) -> None:
        await state.close()


class OpenEnvTool(StatelessTool):
    """One tool of a server."""

    state_of = SESSION

    def __init__(self, given: Json) -> None:
        self.name, self.description = given["name"], given.get("description") or ""
        self.schema = given.get("inputSchema") or given.get("input_schema") or {}

    async def call(self, arguments: Json, state: OpenEnvSession) -> ToolResult:
        """Raises ToolError with the server's text."""
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        return ToolResult(_shown(await state.take(arguments if self.name == STEP else call)))


class OpenEnvServers:
    """Shared state of a server's sessions, and the source of their tools."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.headers = expanded("OpenEnv", "headers", headers)
        self.http = HttpSession(headers=self.headers)
        self.takes_turns = self.can_fork = False
        self.text_key = ""  # the field of an action that consists of a single text
        self.tools: list[StatelessTool] = []
        self.num_open, self.most, self.freed = 0, 1 << 30, asyncio.Event()  # sessions
        self._lock, self.num_replays, self.num_refused = asyncio.Lock(), 0, 0

    @property
    def fork_mode(self) -> ForkMode:
        """The server's forks, else replays, after NUM_MEASURED equal ones and while none
        differs."""
        known = self.num_replays >= NUM_MEASURED and not self.num_refused
        return "snapshot" if self.can_fork else "replay" if known else "none"

    async def measure(self, session: OpenEnvSession) -> None:
        """Replay one of the first episodes after its end."""
        if self.can_fork or self.num_replays >= NUM_MEASURED or self.num_refused:
            return
        other = OpenEnvSession(self)
        try:
            with suppress(EnvError, InfraError):
                await other.replay(session.record)
        finally:
            await uncancelled(other.close())

    async def load(self) -> list[StatelessTool]:
        """The tools. Requests version, action and tools once. Raises ConfigError."""
        async with self._lock:
            if not self.tools:
                await self._describe()
        return self.tools

    async def _describe(self) -> None:
        who = f"no OpenEnv 1.x server at {self.url}"
        with reported_as(ConfigError, who, DataError, TypeError, KeyError, AttributeError):
            api, schema = await self.request("/openapi.json"), await self.request("/schema")
            listed = await self.request("/mcp", _rpc("tools/list"))
            version, action = str(api["info"]["version"]), schema["action"]
            tools = listed.get("result", {}).get("tools", ())
        if not version.startswith("1."):
            raise ConfigError(f"{self.url}: expected OpenEnv version 1.x, got {version}")
        self.can_fork = "fork" in api["info"].get("x-openenv-capabilities", ())
        action = inlined(action, action.get("$defs", {}), ())
        fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
        self.takes_turns = {"content", "tool_calls"} <= fields.keys()
        if fields and "tool_name" not in fields:
            keys, about = action.get("required", []), action.get("description", "One action.")
            self.text_key = (
                keys[0] if [fields[key].get("type") for key in keys] == ["string"] else ""
            )
            schema = {"type": "object", "properties": fields, "required": keys}
            tools = [{"name": STEP, "description": about, "inputSchema": schema}]
        self.tools = [SessionTool(self), *map(OpenEnvTool, tools)]

    async def request(self, path: str, body: Json | None = None) -> Any:
        """The answer to an HTTP request. Raises DataError."""
        return await fetched(self.url + path, self.headers, body)

    def stats(self) -> dict[str, float]:
        """The number of replays, and of those that differed."""
        return {"openenv/num_replays": self.num_replays, "openenv/num_refused": self.num_refused}

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self.http.close()


class OpenEnvSession:
    """A session of the server. `record` has the requests of the episode and their answers."""

    def __init__(self, server: OpenEnvServers) -> None:
        self.server, self.has_ended, self._id = server, False, ""
        self.record: Record = []
        self._num_taken = 0  # entries of the record whose rewards were returned
        self._socket: JsonSocket | None = None

    async def begin(self, chosen: Json, waits: bool = True) -> Json:
        """Open a session, within the limit, and reset it. Raises EnvError, and InfraError without a
        session."""
        while waits and self.server.num_open >= self.server.most:
            self.server.freed.clear()
            with waiting(f"a session of {self.server.url}"):
                await self.server.freed.wait()
        await self._connect("")
        observation = await self.take(chosen, "reset")
        self._id = str((observation.get("metadata") or {}).get("session_id"))
        return observation

    def new_reward(self) -> float:
        """The rewards since the last call."""
        new, self._num_taken = self.record[self._num_taken :], len(self.record)
        return _reward(new)

    def turned(self, observation: Json) -> StepResult:
        """The step of a server whose actions are turns."""
        facts = observation.get("metadata") or {}
        cut, info = bool(facts.get("truncated")), dict(facts.get("info") or {})
        return _messages(observation), self.new_reward(), self.has_ended and not cut, cut, info

    async def copy(self) -> OpenEnvSession:
        """An independent session in the same state. Raises EnvError."""
        other = OpenEnvSession(self.server)
        try:
            await self._copy_to(other)
        except BaseException:
            await uncancelled(other.close())
            raise
        other.record, other._num_taken = [*self.record], self._num_taken
        return other

    async def _copy_to(self, other: OpenEnvSession) -> None:
        who = f"{self.server.url}: a session cannot be copied"
        with reported_as(EnvError, who, DataError, LookupError, InfraError):
            if not self.server.can_fork:
                return await other.replay(self.record)
            request = _rpc("openenv/session/fork", session_id=self._id)
            made = await self.server.request("/mcp", request)
            if "error" in made:
                raise InfraError(str(made["error"]))
            return await other._connect(made["result"]["session_ids"][0])

    async def replay(self, record: Record) -> None:
        """Replay another session's requests. Raises EnvError if the answers differ."""
        await self.begin(record[0][1], waits=False)
        for kind, data, _ in record[1:]:
            with suppress(ToolError):
                await self.take(data, kind)
        self.server.num_replays += 1
        if self.record != record:
            self.server.num_refused += 1
            raise EnvError(f"{self.server.url}: a replay got different answers than the first time")

    async def close(self) -> None:
        """End the session; idempotent."""
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
        """The observation. Raises ToolError for an action that the server rejects, EnvError for a
        lost session, and InfraError if no session is available."""
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


def _reward(record: Record) -> float:
    return sum(float(found.reward or 0.0) for *_, found in record)


def _rpc(method: str, **params: Any) -> Json:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def _turn(action: Message) -> Json:
    return {"content": action.content, "tool_calls": action.tool_calls}


def _messages(observation: Json) -> list[Message]:
    """The messages of an observation that consists of messages; observations of games do not."""
    with suppress(ForeignError):
        return convert(observation.get("messages") or [], list[Message])
    return []


def _shown(observation: Json) -> str:
    """The result for the policy: a text verbatim, else JSON. Raises ToolError for a failed call."""
    if failure := "tool_name" in observation and observation.get("error"):
        raise ToolError(str(failure.get("message")))
    if "tool_name" in observation:
        return text_of_json(observation.get("result"))
    fields = {key: value for key, value in observation.items() if key != "metadata"}
    shown = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    return text_of_json(shown or observation.get("metadata") or "")


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
    first = options.get("seed", HELD_OUT_SEED if held_out else 0)
    number = options.get("size", SIZE)
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
            yield {**row, "answer": "one that the server rewards", KEY: chosen}
