"""Tools of MCP servers as tools of an environment; needs the extra `mcp`.

    [[env.tools]]
    name = "agentenv.envs.bridges.mcp_tools:MCPTools"
    kwargs = { command = ["python", "my_server.py"] }
    # kwargs = { url = "https://host/mcp", headers = { Authorization = "Bearer ${MY_TOKEN}" } }

A server runs with your permissions and serves all episodes: it is trusted code, and its state is
shared. So its tools cannot fork unless `fork_mode` declares that they are stateless.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TextIO, cast

from agentenv.base.errors import ConfigError, ForeignError, InfraError, ToolError, reported_as
from agentenv.base.installation import needed
from agentenv.base.secrets import SECRETS
from agentenv.base.types import ToolResult
from agentenv.base.untrusted import decode
from agentenv.base.urls import checked_url, public_url
from agentenv.contract.env import ForkMode, shared
from agentenv.contract.tools import StatelessTool
from agentenv.processes.guard import guarded

PING_S = 5.0
START_TIMEOUT_S = 30.0
HTTP_TIMEOUT_S = 30.0  # to connect, and to send
STREAM_TIMEOUT_S = 86400.0  # between events of a server, which may be silent for long
STOP_TIMEOUT_S = 10.0
GRACE_S = 1.0  # for a server to end; the package kills it after 2
MAX_PAGES = 1000  # of a server's list of tools
MAX_LOG_CHARS = 2000  # of a server's standard error, shown if it does not start
MAX_VALUES = 100_000  # of a reply
EDGE_BYTES = 200  # of a line, in which its id is
INVALID_REQUEST_CODES = (-32600, -32602)  # JSON-RPC: the call is invalid
WRITERS = ("httpx2", "mcp.client.streamable_http")  # loggers of addresses
TOO_LARGE = "the result is too large"
_LARGE = re.compile(rf"{TOO_LARGE}|byte limit")  # the package's text for an event
# of a reply, before its result or after it
_ID = re.compile(rb'\A[\s{]*(?:"jsonrpc"[^,{}]*,\s*)?"id":\s*(\d+)|"id":\s*(\d+)[^{}]*\}\s*\Z')
_STRING, _VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)'), re.compile(rb"[,\[{]")
_EVENT_END = re.compile(rb"\n\n|\r\r|\r\n\r\n")
# data in base64, such as an image, of which no policy reads the letters
_BASE64 = re.compile(
    r"(?a)(?:data:(?P<type>[\w/.+-]+);base64,)?(?<![\w/+-])(?=[\w/+-]*[A-Z])(?=[\w/+-]*[a-z])"
    r"(?=[\w/+-]*\d)(?P<data>[\w/+-]{1000,}=*)"
)
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class MCPTools:
    """A source of tools for a ToolEnv: all tools of one server, or those in `only`.

    `command` starts a server that uses its standard streams; `env` adds to the few environment
    variables that it inherits. `url` is a server with streamable HTTP; each request has `headers`.
    In values of `env` and `headers`, "${NAME}" stands for an environment variable, so that a
    configuration contains no secret. Episodes of a process share one connection, which the first
    one opens, and which is reopened after a break.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        fork_mode: ForkMode = "none",
        call_timeout_s: float = 60.0,
    ) -> None:
        if (not command) == (not url) or isinstance(command, str):
            raise ConfigError(
                "MCPTools: set either command = ['program', 'argument', ...] or url = 'http..'"
            )
        if url:
            checked_url(url, "MCPTools: url")
        if (headers and not url) or (env and url):
            raise ConfigError("MCPTools: headers require url, and env requires command")
        if isinstance(only, str):
            raise ConfigError(f"MCPTools: only: expected a list of names, such as [{only!r}]")
        needed("mcp", "mcp", "MCPTools")
        table = ("headers", headers) if url else ("env", env)
        extra = expanded("MCPTools", *table)
        key = ("mcp", tuple(command or ()), url, tuple(sorted(extra.items())))
        for writer in WRITERS if url else ():  # an address may contain a key
            logging.getLogger(writer).setLevel(logging.WARNING)
        self.connection = shared(key, lambda: Connection(command, url, extra))
        self.only = None if only is None else list(only)
        self.fork_mode: ForkMode = fork_mode
        self.call_timeout_s = call_timeout_s

    async def load(self) -> list[MCPTool]:
        """The tools; connects if necessary. Raises ConfigError for a server that does not start or
        lacks a tool in `only`."""
        offered = await self.connection.start()
        names = [tool.name for tool in offered]
        unknown = sorted(set(self.only or ()) - set(names))
        if unknown:
            raise ConfigError(f"MCPTools: {self.connection.place} has no tools {unknown}: {names}")
        for tool in offered:
            if not isinstance(tool.input_schema.get("properties", {}), dict):
                raise ConfigError(
                    f"MCPTools: {self.connection.place} returns a schema for {tool.name!r} whose "
                    "properties are not an object"
                )
        return [
            MCPTool(self, tool.name, tool.description or "", dict(tool.input_schema))
            for tool in offered
            if self.only is None or tool.name in self.only
        ]


class MCPTool(StatelessTool):
    """One tool of a server. The policy reads the errors that the server reports."""

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
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed.")
        return ToolResult(text)


class Connection:
    """A session with one server, kept open by a separate task, as its cancel scopes require.

    `extra` has the environment variables of a started server, or the headers for a URL.
    """

    def __init__(
        self, command: Sequence[str] | None, url: str | None, extra: Mapping[str, str]
    ) -> None:
        self.place = public_url(url) if url else " ".join(command or ())
        self._command = list(command or ())
        self._url = url
        self._extra = dict(extra)
        self._refusal = ""  # the last HTTP status that was an error
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Any, list[Any]]] | None = None

    async def start(self) -> list[Any]:
        """The server's tools; connects once, even for concurrent calls."""
        return (await self._session())[1]

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """The result of a call, in the package's form."""
        from mcp import MCPError

        # it worked at the start, so this is an infrastructure failure
        with reported_as(InfraError, "", ConfigError):
            session, _ = await self._session()
        owner = self._owner
        try:
            async with asyncio.timeout(timeout_s):
                return await session.call_tool(name, arguments, timeout_s)
        except MCPError as error:
            if error.error.code in INVALID_REQUEST_CODES or _LARGE.search(str(error)):
                raise ToolError(f"{name}: {error}") from error
            self._break(owner)
            raise InfraError(self._failure(str(error))) from error
        except TimeoutError as error:
            if not await _answers(session):
                self._break(owner)
            raise InfraError(
                f"MCP server {self.place}: no result of {name} within {timeout_s:g} s"
            ) from error
        except Exception as error:  # the process boundary: whatever comes of a server's bytes
            if not isinstance(error, ValueError | RuntimeError):  # these concern one result
                self._break(owner)
            raise InfraError(self._failure(_reason(error))) from error

    async def close(self) -> None:
        """End the session, and the server if it was started here; idempotent."""
        owner = self._owner
        self._break(owner)
        if owner is not None:
            await asyncio.wait({owner}, timeout=STOP_TIMEOUT_S)

    def _break(self, owner: asyncio.Task[None] | None) -> None:
        """Drop the session of `owner`, unless another call did; the next call opens a new one."""
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
        """Keep the session open until cancelled."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with self._open(cast(TextIO, log)) as session:
                    ready.set_result((session, await _all_tools(session)))
                    await asyncio.get_running_loop().create_future()
            except Exception as error:  # the process boundary: whatever the transport raises
                if not ready.done():
                    log.seek(0)
                    ready.set_exception(self._unusable(error, log.read()))
                    ready.exception()  # every waiting call reads it too
            finally:
                if not ready.done():
                    ready.cancel()

    def _unusable(self, error: Exception, log: str) -> ConfigError:
        problem = SECRETS.known(log)[-MAX_LOG_CHARS:].strip()
        hint = f" (HTTP {self._refusal})" if self._refusal else ""
        if self._refusal in ("401", "403"):
            hint += "; MCPTools takes headers, such as { Authorization = 'Bearer ${MY_TOKEN}' }"
        elif self._url is not None:
            hint += "; expected a server of streamable HTTP"
        problem = f"; it wrote: {problem}" if problem else ""
        return ConfigError(
            f"MCP server {self.place} cannot be used: {_reason(error)}{hint}{problem}"
        )

    def _failure(self, problem: str) -> str:
        status = f" (HTTP {self._refusal})" if self._refusal else ""
        return f"MCP server {self.place}: {problem}{status}"

    @asynccontextmanager
    async def _open(self, log: TextIO) -> AsyncIterator[Any]:
        from httpx2 import AsyncClient, Timeout
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        class _Session(ClientSession):
            async def validate_tool_result(self, *_: Any) -> None:
                """Skip the check: the policy reads results that violate their schema."""

        async with contextlib.AsyncExitStack() as stack:
            if self._url is not None:
                client = await stack.enter_async_context(
                    AsyncClient(
                        headers={"Accept-Encoding": "identity", **self._extra},
                        timeout=Timeout(HTTP_TIMEOUT_S, read=STREAM_TIMEOUT_S),
                        event_hooks={"response": [self._note_refusal, _bound]},
                    )
                )
                streams = await stack.enter_async_context(
                    streamable_http_client(self._url, http_client=client)
                )
            else:
                program, *arguments = guarded(self._command, GRACE_S, stdin=True)
                extra = self._extra or None
                server = StdioServerParameters(
                    command=program, args=arguments, env=extra, encoding=_BOUNDED
                )
                streams = await stack.enter_async_context(stdio_client(server, errlog=log))
            session = await stack.enter_async_context(_Session(streams[0], streams[1]))
            await session.initialize()
            yield session

    async def _note_refusal(self, response: Any) -> None:
        """Note the status, since the package reports only that there was an error."""
        self._refusal = str(response.status_code) if response.status_code >= 400 else ""


async def _bound(response: Any) -> None:
    """Bound the reply, or each event of a stream, and its nested values: the package needs hundreds
    of bytes for each."""
    from httpx2 import AsyncByteStream, SSEError, StreamError

    from agentenv.contract.http_session import MAX_REPLY_BYTES

    whole = response.stream
    is_stream = response.headers.get("Content-Type", "").startswith("text/event-stream")

    class _Bounded(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            # the package fails the request with these, and the connection with others
            error, held = (SSEError if is_stream else StreamError)(TOO_LARGE), bytearray()
            async for piece in whole:
                held += piece
                is_whole = is_stream and _EVENT_END.search(held)
                if len(held) > MAX_REPLY_BYTES or (is_whole and _is_dense(held)):
                    raise error
                if is_whole:
                    yield bytes(held)
                    held.clear()
            if _is_dense(held):
                raise error
            yield bytes(held)

        aclose = whole.aclose

    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise InfraError("a compressed reply, which was not requested")
    response.stream = _Bounded()


def _is_dense(data: bytes | bytearray) -> bool:
    """Whether a reply has so many values that they take far more memory than their text."""
    if data.count(b'"') - data.count(b'\\"') > MAX_VALUES:  # too many strings for `sub`
        return True
    signs = _STRING.sub(b"", data)  # the package describes each unknown key
    return len(_VALUE.findall(signs)) + 4 * signs.count(b":") > MAX_VALUES


class _Lines(codecs.IncrementalDecoder):
    """Decodes whole lines of a server's standard output. A line that is too large becomes an error
    of its call, or no message: its middle is not kept."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self.reset()

    def reset(self) -> None:
        """Begin a line."""
        self._line, self._num_bytes = bytearray(), 0

    def decode(self, data: Any, final: bool = False) -> str:
        """The lines that end in `data`."""
        return "".join(map(self._added, bytes(data).splitlines(keepends=True)))

    def _added(self, part: bytes) -> str:
        from agentenv.contract.http_session import MAX_REPLY_BYTES

        self._line += part
        self._num_bytes += len(part)
        is_large = self._num_bytes > MAX_REPLY_BYTES
        if is_large:
            del self._line[EDGE_BYTES:-EDGE_BYTES]
        if not part.endswith(b"\n"):
            return ""
        line = self._line
        self.reset()
        if not (is_large or _is_dense(line)):
            return line.decode(errors=self.errors)
        error, found = {"code": -32000, "message": TOO_LARGE}, _ID.search(line)
        reply = {"jsonrpc": "2.0", "id": int(found[1] or found[2]), "error": error} if found else ""
        return f"{json.dumps(reply)}\n"


_BOUNDED = "agentenv_bounded_lines"  # a name for the package, which calls `codecs.lookup`
_CODEC = codecs.CodecInfo(codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_Lines)
codecs.register({_BOUNDED: _CODEC}.get)


async def _all_tools(session: Any) -> list[Any]:
    """The tools of all pages of the server's list. Raises ConfigError for an endless list."""
    from mcp.types import PaginatedRequestParams

    tools: list[Any] = []
    cursors: list[str] = []
    while True:
        params = PaginatedRequestParams(cursor=cursors[-1]) if cursors else None
        page = await session.list_tools(params=params)
        tools += page.tools
        if not page.next_cursor:
            return tools
        if page.next_cursor in cursors:
            raise ConfigError(f"its list of tools repeats the cursor {page.next_cursor!r}")
        cursors.append(page.next_cursor)
        if len(cursors) == MAX_PAGES:
            raise ConfigError(f"its list of tools exceeds {MAX_PAGES} pages")


def expanded(owner: str, key: str, values: Mapping[str, str] | None) -> dict[str, str]:
    """The values with each ${NAME} replaced. Raises ConfigError, which never shows a value."""
    expanded = {}
    SECRETS.learn({key: values})
    if values and not (
        isinstance(values, Mapping) and all(isinstance(one, str) for one in values.values())
    ):
        raise ConfigError(f"{owner}: {key}: expected a table of strings, NAME = 'VALUE'")
    for name, value in (values or {}).items():
        for variable in _VARIABLE.findall(value):
            if not os.environ.get(variable):
                raise ConfigError(f"{owner}: {key}.{name}: {variable} is not set")
        text = expanded[name] = _VARIABLE.sub(lambda found: os.environ[found[1]], value)
        if key == "headers" and not (text.isascii() and text.isprintable()):
            raise ConfigError(f"{owner}: {key}.{name}: expected one line of ASCII characters")
    return expanded


async def _answers(session: Any) -> bool:
    """Whether the session still works: a damaged reply can break it permanently."""
    try:
        async with asyncio.timeout(PING_S):
            await session.send_ping()
    except Exception:  # the process boundary, as for a call
        return False
    return True


def _reason(error: BaseException) -> str:
    """The first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


# Conversion of results to text for the policy; see the Model Context Protocol, revision 2025-11-25,
# "Tools", section "Tool Result".


def text_of(result: Any) -> str:
    """The blocks of a result in order, each on its own lines, then its structured content as JSON
    unless the blocks contain it.

    Texts are unchanged; other blocks are described by kind, type, size and address.
    """
    shown = [_block_text(block) for block in result.content]
    structured = result.structured_content
    is_new = structured is not None and not _is_shown(structured, result.content)
    if is_new and (structured or not shown):
        text = json.dumps(structured, ensure_ascii=False, separators=(",", ":"))
        shown.append(without_binary(text))
    return "\n".join(shown)


def text_of_json(value: Any) -> str:
    """As `text_of`, for a result in JSON or any value: its only text, else JSON. Raises ToolError
    for a result that is marked as an error."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        blocks = [one.get("text") or f"[{one.get('type')}]" for one in value["content"]]
        if value.get("is_error") or value.get("isError"):
            raise ToolError("\n".join(blocks) or "The tool failed.")
        return "\n".join(blocks) or text_of_json(value.get("structured_content") or "")
    if isinstance(value, dict) and len(value) == 1:
        (value,) = value.values()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return without_binary(text)


def without_binary(text: str) -> str:
    """The text with the size of base64 data, such as an image, in its place."""
    return _BASE64.sub(lambda one: _described("binary", one["type"], _size(one["data"])), text)


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "resource":
            resource = block.resource
            if hasattr(resource, "text"):
                return str(resource.text)
            return _described("resource", resource.mime_type, _size(resource.blob), resource.uri)
        case "resource_link":
            return _described("resource_link", block.name, block.uri, block.description)
        case "image" | "audio":
            return _described(block.type, block.mime_type, _size(block.data))
        case kind:
            return _described(kind)


def _described(*parts: object) -> str:
    return f"[{', '.join(str(part) for part in parts if part)}]"


def _size(base64: str) -> str:
    """The size of the data in a base64 text."""
    return f"{len(base64.rstrip('=')) * 3 // 4} bytes"


def _is_shown(structured: Any, blocks: Sequence[Any]) -> bool:
    """Whether the blocks contain the structured content: servers repeat it as JSON or plain text,
    as a whole or as the only value of an object ("result", "content")."""
    texts = [block.text for block in blocks if block.type == "text"]
    values = [_value(text) for text in texts]
    forms = [*texts, "\n".join(texts), *values, texts, values]
    forms.append(
        [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in blocks]
    )
    wholes = [structured]
    if isinstance(structured, dict) and len(structured) == 1:
        wholes += structured.values()
    known = set(map(_json, forms)) if blocks else set()
    return any(_json(whole) in known for whole in wholes)


def _json(value: Any) -> str:
    """A canonical text of a JSON value, in which true differs from 1."""
    return json.dumps(value, sort_keys=True)


def _value(text: str) -> Any:
    """The JSON value of a text, else the text."""
    try:
        return decode(text)
    except ForeignError:
        return text
