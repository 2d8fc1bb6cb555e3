"""HTTP APIs as tools: one client for all episodes of an event loop, and errors by status.

    api = HttpClient("https://host/v1", login=log_in)

    @tool
    async def price(item: str) -> str:
        '''What an item costs.'''
        return str((await api.get(f"/items/{item}"))["price"])

    2xx                       the body, JSON as a value
    408, 425, 429, 5xx        InfraError: tried again, not before Retry-After; no policy sees it
    other 4xx, and 3xx        ToolError: the policy reads what the API says
    no answer, or half of one InfraError

What `raise_for_status` of aiohttp, httpx and requests raises in a tool means the same, and so do
their errors of connections: `meaning` knows. Every environment asks it, so aiohttp is loaded with
the first client, not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentenv.env import shared
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    DataError,
    EnvError,
    ForeignError,
    InfraError,
    ToolError,
)
from agentenv.untrusted import decode

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

BUSY = (408, 425, 429)
MAX_REASON_CHARS = 500
_LIBRARIES = {"aiohttp", "httpx", "httpx2", "requests"}
_CONNECTION = {  # of them: no answer, or half of one
    "ClientConnectionError", "ClientPayloadError", "TransportError", "ConnectionError", "Timeout",
    "ChunkedEncodingError",
}  # fmt: skip


def status_error(
    status: int, text: str = "", headers: Mapping[str, str] | None = None
) -> ToolError | InfraError:
    """The error of a tool for this status, other than 2xx. `text` is the body, which the policy
    reads in a ToolError.
    """
    said = _reason(text)[:MAX_REASON_CHARS]
    if status in BUSY or status >= 500:
        wanted_s = retry_after_s(headers or {}) or 0.0
        return InfraError(f"HTTP {_named(status)}{said and ': '}{said}", wanted_s)
    return ToolError(said or f"HTTP {_named(status)}", {"status": status})


def meaning(error: BaseException) -> AgentEnvError | None:
    """The error of a tool for an error of an HTTP library; None for other errors."""
    if type(error).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
        return status_error(status, headers=headers)
    if _CONNECTION.isdisjoint(one.__name__ for one in type(error).__mro__):
        return None
    return InfraError(f"{type(error).__name__}: {error}")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None without one."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        until = email.utils.parsedate_to_datetime(text)
        now = email.utils.parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def _reason(text: str) -> str:
    """The error message of a body: a text, or an object of JSON."""
    try:
        found = decode(text)
    except ForeignError:
        return text.strip()
    held = found if isinstance(found, dict) else {}
    said = [held[key] for key in ("error", "message", "detail") if isinstance(held.get(key), str)]
    return said[0] if said else text.strip()


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


FETCH_S = 30.0


def fetch(url: str, headers: Mapping[str, str], body: Any = None) -> Any:
    """The JSON that an address answers, to a POST if there is a `body`, without a loop: for data,
    and for threads. None where the server has no such route. Raises DataError."""
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    try:
        request = urllib.request.Request(url, data, sent)
        with urllib.request.urlopen(request, timeout=FETCH_S) as response:
            return decode(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 405, 501):
            return None
        raise DataError(f"{url}: HTTP {_named(error.code)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{url}: no answer: {error}") from error
    except ForeignError as error:
        raise DataError(f"{url}: the answer is not valid JSON: {error}") from error


class JsonSocket:
    """A WebSocket of messages in JSON, whose answers come in the order of the requests. What is cut
    off ends it, since an answer that nobody has read would answer the next request."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._problem = "it is not connected"
        self._ws: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self, http: aiohttp.ClientSession) -> None:
        """Raises InfraError."""
        import aiohttp

        try:
            async with asyncio.timeout(self.timeout_s):
                self._ws = await http.ws_connect(self.url, max_msg_size=0)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfraError(f"{self.url}: {type(error).__name__}: {error}") from error
        self._problem = ""

    async def ask(self, message: Any, kind: type[T]) -> T:
        """The answer. Raises EnvError where none comes in time, and from then on."""
        import aiohttp

        if self._problem or self._ws is None:
            raise EnvError(f"{self.url}: the session is lost: {self._problem}")
        self._problem = "a request was interrupted"
        text = msgspec.json.encode(message).decode()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._ws.send_str(text)
                answer = await self._ws.receive()
            if answer.type is not aiohttp.WSMsgType.TEXT:
                raise ForeignError(f"the server closed it ({answer.data or answer.type.name})")
            found = decode(answer.data, kind)
        except TimeoutError as error:
            self._problem = f"no answer within {self.timeout_s:g} s to {text:.200}"
            raise EnvError(f"{self.url}: {self._problem}") from error
        except (aiohttp.ClientError, OSError, ForeignError) as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise EnvError(f"{self.url}: the session is lost: {self._problem}") from error
        self._problem = ""
        return found

    async def close(self) -> None:
        """Waits for the other end for ten seconds at most. Idempotent."""
        ws, self._ws, self._problem = self._ws, None, "it is closed"
        if ws is not None:
            await ws.close()


Login = Callable[["HttpClient"], Awaitable[Mapping[str, str]]]


class HttpClient:
    """One API, for a module of tools: made once, without a loop.

    Each event loop has a session of its own, with at most `max_connections`, which ends with what
    the loop's episodes share. `login` gives the headers of all further requests (a token) by
    requests of its own; it is called before the first of them, and again after a 401.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        login: Login | None = None,
        timeout_s: float = 30.0,
        max_connections: int = 100,
    ) -> None:
        self.url = url.rstrip("/")
        self.headers = dict(headers or {})
        self.login = login
        self.timeout_s = timeout_s
        self.max_connections = max_connections

    async def get(self, path: str, **params: str | int | float) -> Any:
        """The answer to a GET."""
        return await self.request("GET", path, params=params)

    async def post(self, path: str, json: Any = None) -> Any:
        """The answer to a POST of a value as JSON."""
        return await self.request("POST", path, json=json)

    async def prepare(self) -> None:
        """Log in, so that a run is refused at its start where that fails. Raises ConfigError."""
        await self._session().token()

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """The answer: a value of JSON, else a text; None for an empty one. Raises ToolError,
        InfraError, and ConfigError where the login is refused. `options` are those of aiohttp's
        `ClientSession.request`."""
        session = self._session()
        token = await session.token()
        status, text, headers = await self._answer(session.http, method, path, token, options)
        if status == HTTPStatus.UNAUTHORIZED and token:
            token = await session.token(instead_of=token)
            status, text, headers = await self._answer(session.http, method, path, token, options)
        if not 200 <= status < 300:
            raise status_error(status, text, headers)
        if "json" not in headers.get("Content-Type", ""):
            return text or None
        try:
            return decode(text)
        except ForeignError as error:
            raise InfraError(f"{method} {path}: the body is not valid JSON: {error}") from error

    async def _answer(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        token: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> tuple[int, str, Mapping[str, str]]:
        import aiohttp

        headers = {**self.headers, **token, **options.get("headers", {})}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with http.request(
                method, self.url + path, **{**options, "headers": headers, "timeout": timeout}
            ) as response:
                text = await response.text(errors="replace")
                return response.status, text, response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfraError(f"{method} {path}: {type(error).__name__}: {error}") from error

    def _session(self) -> _Session:
        key = ("http", self, asyncio.get_running_loop())
        return shared(key, lambda: _Session(self))


class _Session:
    """Shared state of the episodes of one loop: connections, and the token of a login."""

    def __init__(self, client: HttpClient) -> None:
        import aiohttp

        self._client = client
        connector = aiohttp.TCPConnector(limit=client.max_connections)
        self.http = aiohttp.ClientSession(connector=connector)
        self._login: asyncio.Task[dict[str, str]] | None = None

    async def token(self, instead_of: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """The headers of the login, which is made once for all that wait; of another one, if the
        last gave `instead_of`. Nothing for requests of the login itself."""
        login = self._login
        if self._client.login is None or login is asyncio.current_task():
            return {}
        if login is None or (login.done() and (_failed(login) or login.result() is instead_of)):
            login = self._login = asyncio.ensure_future(self._log_in(self._client.login))
        return await asyncio.shield(login)

    async def _log_in(self, login: Login) -> dict[str, str]:
        try:
            return dict(await login(self._client))
        except ToolError as error:
            raise ConfigError(f"{self._client.url}: the login was rejected: {error}") from error

    async def close(self) -> None:
        if self._login is not None:
            self._login.cancel()
        with contextlib.suppress(RuntimeError):  # of a loop that was closed before
            await self.http.close()


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
