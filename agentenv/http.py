"""HTTP APIs as tools: one client for all episodes of an event loop, and errors by status.

    api = HttpClient("https://host/v1", login=log_in)

    @tool
    async def price(item: str) -> str:
        '''What an item costs.'''
        return str((await api.get(f"/items/{item}"))["price"])

    2xx                       the body, JSON as a value
    401, 402, 407             ConfigError: no fault of the policy, and no retry mends it
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
import os
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

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
MAX_LOGINS = 3  # in a row, of which no request was accepted
MAX_FORBIDDEN = 20  # requests in a row that were all answered 403
_REMEDIES = {
    401: "check the key or token that is sent",
    402: "check the account of the API",
    407: "check the user and password of the proxy",
}
MAX_REASON_CHARS = 500
MIN_SECRET_CHARS = 8  # of the value of a header; shorter ones occur in ordinary text
_LIBRARIES = {"aiohttp", "httpx", "httpx2", "requests"}
_CONNECTION = {  # of them: no answer, or half of one
    "ClientConnectionError", "ClientPayloadError", "TransportError", "ConnectionError", "Timeout",
    "ChunkedEncodingError",
}  # fmt: skip


def status_error(
    status: int, text: str = "", headers: Mapping[str, str] | None = None, what: str = ""
) -> AgentEnvError:
    """The error of a tool for this status, other than 2xx. `text` is the body, which the policy
    reads in a ToolError; `what` names the request in the others, without secrets.
    """
    said = _reason(text)[:MAX_REASON_CHARS]
    full = f"{what and f'{what}: '}HTTP {_named(status)}{said and ': '}{said}"
    if remedy := _REMEDIES.get(status):
        return ConfigError(f"{full}; {remedy}")
    if status in BUSY or status >= 500:
        return InfraError(full, retry_after_s(headers or {}) or 0.0)
    return ToolError(said or f"HTTP {_named(status)}", {"status": status})


def meaning(error: BaseException) -> AgentEnvError | None:
    """The error of a tool for an error of an HTTP library; None for other errors. The address may
    be the policy's own choice, so that no status of it ends a run."""
    if type(error).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
        if status in _REMEDIES:
            return ToolError(f"HTTP {_named(status)}", {"status": status})
        asked = getattr(error, "request_info", None) or response
        url = getattr(asked, "real_url", None) or getattr(asked, "url", "")
        return status_error(status, headers=headers, what=public_url(str(url)))
    if _CONNECTION.isdisjoint(one.__name__ for one in type(error).__mro__):
        return None
    return InfraError(_lost(error))


def _lost(error: BaseException) -> str:
    """Why there is no answer."""
    host, cause = getattr(error, "host", None), getattr(error, "os_error", None)
    if host is None or not isinstance(cause, OSError):
        return f"{type(error).__name__}: {error}"
    number = cause.errno or 0
    reason = os.strerror(number) if number > 0 else cause.strerror
    return f"Cannot connect to {host}:{getattr(error, 'port', '')}: {reason or cause}"


def public_url(url: str) -> str:
    """An address without user, password and query, which may hold a key."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


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
    requests of its own; it is called before the first of them, and again after a 401. That is a
    ConfigError without a login, or after MAX_LOGINS whose token no request could use; a 403, which
    may be about one item only, is one after MAX_FORBIDDEN in a row. Raises ConfigError for a `url`
    that is not one.
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
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            shown = public_url(f"//{url}")[2:] if isinstance(url, str) else repr(url)
            raise ConfigError(
                f"HttpClient: the url is {shown or 'empty'}; expected http://... or https://..."
            )
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

    async def prepare(self, path: str = "") -> None:
        """Log in, and GET `path` once, so that a run is refused at its start where that fails: for
        the `prepare` of a tool. Raises what `request` does."""
        session = self._session()
        await session.token()
        if path and path not in session.prepared:
            await self.get(path)
            session.prepared.add(path)

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """The answer: a value of JSON, else a text; None for an empty one. Raises ToolError,
        InfraError, and ConfigError where the login, or every request, is refused. `options` are
        those of aiohttp's `ClientSession.request`."""
        what = f"{method} {public_url(self.url + path)}"
        status, text, headers = await self._authorized(method, path, what, options)
        if not 200 <= status < 300:
            if status in _REMEDIES:  # read by people, not by the policy
                text = self._without_secrets(text)
            error = status_error(status, text, headers, what)
            if status == HTTPStatus.FORBIDDEN and self._session().num_forbidden >= MAX_FORBIDDEN:
                raise ConfigError(
                    f"{what}: {error}; the last {MAX_FORBIDDEN} requests were all answered HTTP "
                    f"{_named(status)}; check the permissions of the key or token that is sent"
                )
            raise error
        if "json" not in headers.get("Content-Type", ""):
            return text or None
        try:
            return decode(text)
        except ForeignError as error:
            raise InfraError(f"{what}: the body is not valid JSON: {error}") from error

    async def _authorized(
        self, method: str, path: str, what: str, options: Mapping[str, Any]
    ) -> tuple[int, str, Mapping[str, str]]:
        """The answer by the token of a login that serves: a token may have ended, or have been used
        up by others before this request was answered."""
        session = self._session()
        token = await session.token()
        for attempt in count():
            answer = await self._answer(session.http, method, path, what, token, options)
            if answer[0] != HTTPStatus.UNAUTHORIZED or not token:
                session.answered(answer[0], by_token=bool(token))
                return answer
            if session.num_logins >= MAX_LOGINS:
                raise ConfigError(
                    f"{what}: HTTP {_named(answer[0])} after each of {session.num_logins} logins; "
                    "check the headers that `login` returns, and the permissions of the account"
                )
            if attempt == MAX_LOGINS:
                break
            token = await session.token(instead_of=token)
        raise InfraError(f"{what}: HTTP {_named(answer[0])} though other requests are accepted")

    async def _answer(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        what: str,
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
        except TimeoutError as error:
            raise InfraError(f"{what}: no answer within {self.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError(f"{what}: {_lost(error)}") from error

    def _without_secrets(self, text: str) -> str:
        """An answer without the values of `headers`, which it may repeat."""
        for value in self.headers.values():
            for secret in (value, value.rpartition(" ")[2]):  # of "Bearer abc" also abc
                text = text.replace(secret, "...") if len(secret) >= MIN_SECRET_CHARS else text
        return text

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
        self.prepared: set[str] = set()  # paths
        self.num_logins = 0  # since a request was accepted
        self.num_forbidden = 0  # requests in a row
        self._login: asyncio.Task[dict[str, str]] | None = None

    def answered(self, status: int, *, by_token: bool) -> None:
        """A request has this status; `by_token`: it had the headers of the login."""
        if by_token:
            self.num_logins = 0
        if status == HTTPStatus.FORBIDDEN:
            self.num_forbidden += 1
        elif status < 500 and status not in BUSY:
            self.num_forbidden = 0

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
        self.num_logins += 1
        try:
            return dict(await login(self._client))
        except (ToolError, ConfigError) as error:
            where = public_url(self._client.url)
            raise ConfigError(f"{where}: the login was rejected: {error}") from error

    async def close(self) -> None:
        if self._login is not None:
            self._login.cancel()
        with contextlib.suppress(RuntimeError):  # of a loop that was closed before
            await self.http.close()


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
