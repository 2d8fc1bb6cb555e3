"""HTTP APIs as tools: one client for all episodes of an event loop, and the errors of statuses.

    api = HttpClient("https://host/v1", login=log_in)

    @tool
    async def price(item: str) -> str:
        '''What an item costs.'''
        return str((await api.get(f"/items/{item}"))["price"])

    2xx                       the body, JSON as a value
    401, 402, 407             ConfigError: not the policy's fault, and a retry does not help
    408, 425, 429, 5xx        InfraError: retried, not before Retry-After; hidden from the policy
    other 4xx, and 3xx        ToolError: the policy reads the API's message
    no or incomplete response InfraError

`meaning` converts errors of aiohttp, httpx and requests in a tool, from `raise_for_status` and from
connections, in the same way. Every environment uses it, so aiohttp is imported only with the first
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from http.client import responses
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentenv.base.errors import (
    AgentEnvError,
    ConfigError,
    EnvError,
    ForeignError,
    InfraError,
    ToolError,
    reported_as,
)
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import decode
from agentenv.base.urls import checked_url, public_url
from agentenv.contract.env import shared

if TYPE_CHECKING:
    import aiohttp

    from agentenv.contract.http_session import HttpSession

T = TypeVar("T")

MAX_LOGINS = 3  # consecutive logins without an accepted request
MAX_FORBIDDEN = 20  # consecutive responses with status 403
_REMEDIES = {
    401: "check the key or token that is sent",
    402: "check the account of the API",
    407: "check the user and password of the proxy",
}
MAX_REASON_CHARS = 500  # of a server's text in messages
MAX_RETRY_AFTER_S = 1e9  # of any number, which may exceed a float
_LIBRARIES = {"aiohttp", "httpx", "httpx2", "requests"}
_CONNECTION = {  # their errors for no or incomplete responses
    "ClientConnectionError", "ClientPayloadError", "TransportError", "ConnectionError", "Timeout",
    "ChunkedEncodingError",
}  # fmt: skip


def is_temporary(status: int) -> bool:
    """Whether a request with this status may be sent again."""
    return status in (408, 425, 429) or status >= 500


def status_error(
    status: int, text: str = "", headers: Mapping[str, str] | None = None, what: str = ""
) -> AgentEnvError:
    """The tool's error for a status other than 2xx. `text` is the body, which the policy reads in a
    ToolError; `what` names the request in other errors, without secrets.
    """
    reason = reason_of(text)[:MAX_REASON_CHARS]
    full = f"{what and f'{what}: '}HTTP {_named(status)}{reason and ': '}{reason}"
    if remedy := _REMEDIES.get(status):
        return ConfigError(f"{full}; {remedy}")
    if is_temporary(status):
        return InfraError(full, retry_after_s(headers or {}) or 0.0)
    return ToolError(reason or f"HTTP {_named(status)}", {"status": status})


def meaning(error: BaseException) -> AgentEnvError | None:
    """The tool's error for an error of an HTTP library; None for other errors. The policy may have
    chosen the address, so that no status ends the run."""
    if type(error).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int):
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
        if status in _REMEDIES:
            return ToolError(f"HTTP {_named(status)}", {"status": status})
        request = getattr(error, "request_info", None) or response
        url = getattr(request, "real_url", None) or getattr(request, "url", "")
        return status_error(status, headers=headers, what=public_url(str(url)))
    if _CONNECTION.isdisjoint(one.__name__ for one in type(error).__mro__):
        return None
    return InfraError(_lost(error))


def _lost(error: BaseException) -> str:
    """The reason for a missing response."""
    host, cause = getattr(error, "host", None), getattr(error, "os_error", None)
    if host is None or not isinstance(cause, OSError):
        return f"{type(error).__name__}: {error}"
    number = cause.errno or 0
    reason = os.strerror(number) if number > 0 else cause.strerror
    return f"Cannot connect to {host}:{getattr(error, 'port', '')}: {reason or cause}"


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds of a Retry-After header, given as a number or as a date; None without one."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", text, re.ASCII):
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        until = email.utils.parsedate_to_datetime(text)
        date = headers.get("Date") or email.utils.formatdate(usegmt=True)
        now = email.utils.parsedate_to_datetime(date)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def reason_of(text: str | bytes) -> str:
    """The message of an error's body, without secrets: {"error": {"message"}}, {"error"},
    {"message"}, {"detail"}, or text."""
    try:
        found = decode(text)
    except ForeignError:
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    if not isinstance(found, str):
        found = (text if isinstance(text, str) else text.decode(errors="replace")).strip()
    return SECRETS.known(found)  # before it is cut


def _named(status: int) -> str:
    return f"{status} {responses.get(status, '')}".rstrip()


class JsonSocket:
    """A WebSocket with JSON messages, answered in the order of the requests. An interrupted request
    ends the session, since its unread answer would be taken for that of the next request."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._problem = "it is not connected"
        self._ws: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self, http: HttpSession) -> None:
        """Raises InfraError."""
        import aiohttp

        try:
            async with asyncio.timeout(self.timeout_s):
                self._ws = await http.connect(self.url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfraError(f"{self.url}: {type(error).__name__}: {error}") from error
        self._problem = ""

    async def request(self, message: Any, kind: type[T]) -> T:
        """The answer. Raises EnvError if none arrives in time, and for all later requests."""
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
                is_large = getattr(answer.data, "code", 0) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
                remedy = "; let the server send less at once" if is_large else ""
                problem = answer.data or answer.type.name
                raise ForeignError(f"the connection is closed: {problem}{remedy}")
            found = decode(answer.data, kind)
        except TimeoutError as error:
            self._problem = f"no answer within {self.timeout_s:g} s to {SECRETS.known(text):.200}"
            raise EnvError(f"{self.url}: {self._problem}") from error
        except (aiohttp.ClientError, OSError, ForeignError) as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise EnvError(f"{self.url}: the session is lost: {self._problem}") from error
        self._problem = ""
        return found

    async def close(self) -> None:
        """Close, waiting for the other end for ten seconds at most. Idempotent."""
        ws, self._ws, self._problem = self._ws, None, "it is closed"
        if ws is not None:
            await ws.close()


Login = Callable[["HttpClient"], Awaitable[Mapping[str, str]]]


class HttpClient:
    """The client of one API, for a module of tools; created once, without an event loop.

    Each event loop has a separate session, with at most `max_connections`, which is closed with the
    loop's shared resources. `login` makes requests and returns the headers (such as a token) of all
    further requests; it is called before the first one, and again after a 401. A 401 is a
    ConfigError without a login, or after MAX_LOGINS logins whose token was never accepted; a 403,
    which may concern one item only, is a ConfigError after MAX_FORBIDDEN in a row. Raises
    ConfigError for an invalid `url`.
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
        self.url = checked_url(url, "HttpClient")
        self.headers = SECRETS.learn({"headers": dict(headers or {})})["headers"]
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
        """Log in, and GET `path` once, so that a failure is reported at the start of a run: for the
        `prepare` of a tool. Raises the errors of `request`."""
        session = self._session()
        await session.token()
        if path and path not in session.prepared:
            await self.get(path)
            session.prepared.add(path)

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """The response: a JSON value, else a text; None if it is empty. Raises ToolError,
        InfraError, and ConfigError if the login, or every request, is rejected. `options` are those
        of aiohttp's `ClientSession.request`."""
        what = f"{method} {public_url(self.url + path)}"
        status, text, headers = await self._authorized(method, path, what, options)
        if not 200 <= status < 300:
            error = status_error(status, text, headers, what)
            if status == HTTPStatus.FORBIDDEN and self._session().num_forbidden >= MAX_FORBIDDEN:
                raise ConfigError(
                    f"{what}: {error}; the last {MAX_FORBIDDEN} requests were all answered HTTP "
                    f"{_named(status)}; check the permissions of the key or token that is sent"
                )
            raise error
        if "json" not in headers.get("Content-Type", ""):
            return text or None
        with reported_as(InfraError, f"{what}: the body is not valid JSON", ForeignError):
            return decode(text)

    async def _authorized(
        self, method: str, path: str, what: str, options: Mapping[str, Any]
    ) -> tuple[int, str, Mapping[str, str]]:
        """The response with a valid token: a token may have expired, or other requests may have
        replaced it before this one was answered."""
        session = self._session()
        token = await session.token()
        for attempt in count():
            answer = await self._answer(method, path, what, token, **options)
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
        self, method: str, path: str, what: str, token: Mapping[str, str], **options: Any
    ) -> tuple[int, str, Mapping[str, str]]:
        import aiohttp

        from agentenv.contract.http_session import LargeReplyError, read_body

        headers = {**self.headers, **token, **options.get("headers", {})}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        sent = {"allow_redirects": True, **options, "headers": headers, "timeout": timeout}
        try:
            sending = self._session().http.send(method, self.url + path, **sent)
            async with await sending as response:
                body = await read_body(response, cut=not response.ok)
                text = body.decode(response.charset or "utf-8", "replace")
                return response.status, text, response.headers
        except (LargeReplyError, aiohttp.InvalidUrlRedirectClientError) as error:
            raise ToolError(f"{what}: {error}") from error
        except TimeoutError as error:
            raise InfraError(f"{what}: no answer within {self.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, LookupError) as error:  # an unknown charset
            raise InfraError(f"{what}: {_lost(error)}") from error

    def _session(self) -> _Session:
        key = ("http", self, asyncio.get_running_loop())
        return shared(key, lambda: _Session(self))


class _Session:
    """Shared state of the episodes of one loop: connections, and the token of a login."""

    def __init__(self, client: HttpClient) -> None:
        from agentenv.contract.http_session import HttpSession

        self._client = client
        self.http = HttpSession(keeps_cookies=True, limit=client.max_connections)
        self.prepared: set[str] = set()  # paths
        self.num_logins = 0  # since the last accepted request
        self.num_forbidden = 0  # consecutive responses
        self._login: asyncio.Task[dict[str, str]] | None = None

    def answered(self, status: int, *, by_token: bool) -> None:
        """Count a response; `by_token`: its request had the headers of the login."""
        if by_token:
            self.num_logins = 0
        if status == HTTPStatus.FORBIDDEN:
            self.num_forbidden += 1
        elif not is_temporary(status):
            self.num_forbidden = 0

    async def token(self, instead_of: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """The headers of the login, which all waiting requests share; of a new login if the last
        one returned `instead_of`. Empty for requests of the login itself."""
        login = self._login
        if self._client.login is None or login is asyncio.current_task():
            return {}
        if login is None or (login.done() and (_failed(login) or login.result() is instead_of)):
            login = self._login = asyncio.ensure_future(self._log_in(self._client.login))
        return await asyncio.shield(login)

    async def _log_in(self, login: Login) -> dict[str, str]:
        self.num_logins += 1
        try:
            return SECRETS.learn({"headers": dict(await login(self._client))})["headers"]
        except (ToolError, ConfigError) as error:
            where = public_url(self._client.url)
            raise ConfigError(f"{where}: the login was rejected: {error}") from error

    async def close(self) -> None:
        if self._login is not None:
            self._login.cancel()
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            await self.http.close()


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
