"""What a status, or an error of an HTTP library, means to a tool.

    408, 425, 429, 5xx             InfraError: tried again, not before Retry-After
    other 4xx, and 3xx             ToolError: the policy reads what the API says
    no answer, or half of one      InfraError

It loads no HTTP library, since every environment asks it.
"""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from http import HTTPStatus

from agentenv.errors import AgentEnvError, ForeignError, InfraError, ToolError
from agentenv.untrusted import decode

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
    """What an answer with this status, which is none of 2xx, means to a tool. `text` is its body,
    which the policy reads of a ToolError."""
    said = _reason(text)[:MAX_REASON_CHARS]
    if status in BUSY or status >= 500:
        wanted_s = retry_after_s(headers or {}) or 0.0
        return InfraError(f"HTTP {_named(status)}{said and ': '}{said}", wanted_s)
    return ToolError(said or f"HTTP {_named(status)}", {"status": status})


def meaning(error: BaseException) -> AgentEnvError | None:
    """What an error of an HTTP library means to a tool; None for other errors."""
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
