"""The key of an engine server that agentenv starts: every route but /health and /metrics needs
`Authorization: Bearer KEY`. Its environment has the key, its command line has not.

vLLM uses the class (`--middleware agentenv_key.Guard`), since its own key leaves the routes open
that load weights, pause and sleep. SGLang is started by `python -m agentenv_key`, with its own key,
which it would log.

It needs only the engine: agentenv is not installed in that environment.
"""

from __future__ import annotations

import hmac
import logging
import os
import runpy
import sys
from typing import Any

KEY = os.environ["AGENTENV_SERVER_KEY"]
OPEN = ("/health", "/metrics")


class Guard:
    """ASGI middleware. Other requests get status 401, also the handshake of a WebSocket."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind, sent = scope["type"], dict(scope.get("headers", ())).get(b"authorization", b"")
        has_key = hmac.compare_digest(sent, f"Bearer {KEY}".encode())
        if kind == "lifespan" or has_key or scope["path"] in OPEN:
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close"})
        else:
            head = {"status": 401, "headers": [(b"content-type", b"application/json")]}
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": b'{"error": "no key"}'})


class _Record(logging.LogRecord):
    def getMessage(self) -> str:
        return super().getMessage().replace(KEY, "[redacted]")


if __name__ == "__main__":
    logging.setLogRecordFactory(_Record)
    sys.argv = [*sys.argv[1:], "--api-key", KEY, "--admin-api-key", KEY]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
