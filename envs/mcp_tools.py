"""Tools of MCP servers as tools of an environment; needs the extra `mcp`.

    [[env.tools]]
    name = "envs.mcp_tools:MCPTools"
    kwargs = { command = ["python", "my_server.py"] }       # or { url = "http://host/mcp" }

A server runs with your rights and serves all episodes: it is trusted code, and whatever it
remembers between calls is shared. So its tools cannot fork unless `fork_mode` says that they keep
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

from agentenv.env import ForkMode, shared
from agentenv.errors import ConfigError, InfraError, ToolError
from agentenv.guard import guarded
from agentenv.tools import StatelessTool
from agentenv.types import ToolResult

PING_S = 5.0
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
GRACE_S = 1.0  # for a server that is to end; the package kills what takes 2
MAX_LOG_CHARS = 2000  # of a server's standard error, shown when it does not start
INVALID_REQUEST_CODES = (-32600, -32602)  # JSON-RPC: the call is at fault, not the machinery


class MCPTools:
    """A source of tools for a ToolEnv: all tools of one server, or those in `only`.

    `command` starts a server that speaks over its standard streams, `url` is one that speaks
    streamable HTTP; `env` adds to the few variables that a started server inherits. Episodes of a
    process share one connection, which is made by the first of them and again after it broke.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        fork_mode: ForkMode = "none",
        call_timeout_s: float = 60.0,
    ) -> None:
        if (not command) == (not url) or isinstance(command, str):
            raise ConfigError(
                "MCPTools: give either command = ['program', 'argument', ...] or url = 'http..'"
            )
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(
                "MCPTools needs the package mcp, which is missing: pip install 'agentenv[mcp]'"
            )
        key = ("mcp", tuple(command or ()), url, tuple(sorted((env or {}).items())))
        self.connection = shared(key, lambda: Connection(command, url, env))
        self.only = None if only is None else list(only)
        self.fork_mode: ForkMode = fork_mode
        self.call_timeout_s = call_timeout_s

    async def load(self) -> list[MCPTool]:
        """The tools; connects if need be. Raises ConfigError for a server that does not start or
        lacks a tool named in `only`."""
        offered = await self.connection.start()
        names = [tool.name for tool in offered]
        unknown = sorted(set(self.only or ()) - set(names))
        if unknown:
            raise ConfigError(f"MCPTools: {self.connection.place} has no tools {unknown}: {names}")
        for tool in offered:
            if not isinstance(tool.input_schema.get("properties", {}), dict):
                raise ConfigError(
                    f"MCPTools: {self.connection.place} gives {tool.name!r} a schema whose "
                    "properties are no object"
                )
        return [
            MCPTool(self, tool.name, tool.description or "", dict(tool.input_schema))
            for tool in offered
            if self.only is None or tool.name in self.only
        ]


class MCPTool(StatelessTool):
    """One tool of a server. What the server reports as an error, the policy reads."""

    def __init__(
        self, source: MCPTools, name: str, description: str, schema: dict[str, Any]
    ) -> None:
        self.name = name
        self.description = description
        self.schema = {"type": "object", "properties": {}, **schema}
        self.fork_mode = source.fork_mode
        self._source = source

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        """One call. Raises ToolError with the server's text, InfraError without a connection."""
        result = await self._source.connection.call(
            self.name, arguments, self._source.call_timeout_s
        )
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type}]" for part in result.content
        )
        if result.is_error:
            raise ToolError(text or f"{self.name} failed.")
        return ToolResult(text)


class Connection:
    """A session with one server, held open by a task of its own, as its scopes demand."""

    def __init__(
        self, command: Sequence[str] | None, url: str | None, env: Mapping[str, str] | None
    ) -> None:
        self.place = url or " ".join(command or ())
        self._command = list(command or ())
        self._url = url
        self._env = dict(env or {})
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Any, list[Any]]] | None = None

    async def start(self) -> list[Any]:
        """The server's tools; connects once, however many ask at the same time."""
        return (await self._session())[1]

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """The result of a call as the package gives it."""
        from mcp import MCPError

        try:
            session, _ = await self._session()
        except ConfigError as error:  # it worked at the start, so the machinery is at fault
            raise InfraError(str(error)) from error
        owner = self._owner
        try:
            async with asyncio.timeout(timeout_s):
                return await session.call_tool(name, arguments, timeout_s)
        except MCPError as error:
            if error.error.code in INVALID_REQUEST_CODES:
                raise ToolError(f"{name}: {error}") from error
            self._break(owner)
            raise InfraError(f"MCP server {self.place}: {error}") from error
        except TimeoutError as error:
            if not await _answers(session):
                self._break(owner)
            raise InfraError(
                f"MCP server {self.place}: no result of {name} within {timeout_s:g} s"
            ) from error
        except Exception as error:  # the process boundary: whatever comes of a server's bytes
            if not isinstance(error, ValueError | RuntimeError):  # these: of one result
                self._break(owner)
            raise InfraError(f"MCP server {self.place}: {_reason(error)}") from error

    async def close(self) -> None:
        """End the session and the server that was started for it; idempotent."""
        owner = self._owner
        self._break(owner)
        if owner is not None:
            await asyncio.wait({owner}, timeout=STOP_TIMEOUT_S)

    def _break(self, owner: asyncio.Task[None] | None) -> None:
        """Let go of the session of `owner`, unless another call did; the next call opens one."""
        if owner is not None and owner is self._owner:
            owner.cancel()
            self._owner = self._ready = None

    async def _session(self) -> tuple[Any, list[Any]]:
        if self._owner is None or self._owner.done() or self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._owner = asyncio.ensure_future(self._hold(self._ready))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(self._ready)
        except TimeoutError as error:
            self._break(self._owner)
            raise ConfigError(
                f"MCP server {self.place}: no answer within {START_TIMEOUT_S:g} s of its start"
            ) from error

    async def _hold(self, ready: asyncio.Future[tuple[Any, list[Any]]]) -> None:
        """Keeps the session open until cancelled."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with self._open(cast(TextIO, log)) as session:
                    if not ready.done():
                        ready.set_result((session, (await session.list_tools()).tools))
                    await asyncio.get_running_loop().create_future()
            except Exception as error:  # the process boundary: whatever the transport raises
                if not ready.done():
                    log.seek(0)
                    said = log.read()[-MAX_LOG_CHARS:].strip()
                    ready.set_exception(
                        ConfigError(
                            f"MCP server {self.place} cannot be used: {_reason(error)}"
                            + (f"; it wrote: {said}" if said else "")
                        )
                    )
                    ready.exception()  # whoever waits reads it too
            finally:
                if not ready.done():
                    ready.cancel()

    @asynccontextmanager
    async def _open(self, log: TextIO) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            if self._url is not None:
                streams = await stack.enter_async_context(streamable_http_client(self._url))
            else:
                program, *arguments = guarded(self._command, GRACE_S, stdin=True)
                server = StdioServerParameters(
                    command=program, args=arguments, env=self._env or None
                )
                streams = await stack.enter_async_context(stdio_client(server, errlog=log))
            session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
            await session.initialize()
            yield session


async def _answers(session: Any) -> bool:
    """Whether the session still hears its server: what one damaged reply made deaf stays so."""
    try:
        async with asyncio.timeout(PING_S):
            await session.send_ping()
    except Exception:  # the process boundary, as for a call
        return False
    return True


def _reason(error: BaseException) -> str:
    """The first real error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
