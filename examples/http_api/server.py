"""The API of the example: prices of stores, after a login.

    POST /login {"user", "password"}                  {"token"}, valid for 200 requests
    GET /stores/57/items/Zorvex                       {"price"}
    POST /stores/57/quotes {"item", "count"}          {"total"}
    POST /logout                                      {}

Like a real API, it answers some requests with 429 or 500. `python examples/http_api/server.py`
serves it on port 8080.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from random import Random
from typing import Any

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
ITEMS = NAMES.split()
USER, PASSWORD = "desk", "open sesame"
USES = 200  # number of requests per token
BUSY, BROKEN = 25, 60  # every 25th request gets 429, every 60th 500


def price_of(store: int, item: str) -> int:
    """The price of an item in a store."""
    return Random(f"{store} {item}").randint(52, 99)


class Api(BaseHTTPRequestHandler):
    """A connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(size) or b"{}"))

    def _answer(self, body: dict[str, Any]) -> None:
        status, found = self._route(self.path.strip("/").split("/"), body)
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def _route(self, path: list[str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the response."""
        server = self.server
        assert isinstance(server, Server)
        if path == ["login"]:
            if (body.get("user"), body.get("password")) != (USER, PASSWORD):
                return 403, {"error": "wrong user or password"}
            return 200, {"token": server.new_token()}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path == ["logout"]:
            server.uses.pop(token, None)
            return 200, {}
        number = next(server.numbers)
        if number % BUSY == 0:
            return 429, {"error": "too many requests"}
        if number % BROKEN == 0:
            return 500, {"error": "out of order"}
        if not server.is_valid(token):
            return 401, {"error": "log in first"}
        return self._price(path, body)

    def _price(self, path: list[str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match path:
            case ["stores", store, "items", item] if store.isdigit() and item in ITEMS:
                return 200, {"price": price_of(int(store), item)}
            case ["stores", store, "quotes"] if store.isdigit() and body.get("item") in ITEMS:
                if not 1 <= body["count"] <= 99:
                    return 422, {"error": "count: expected 1 to 99"}
                return 200, {"total": price_of(int(store), body["item"]) * body["count"]}
        return 404, {"error": "There is no such store or item."}

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


class Server(ThreadingHTTPServer):
    """The API in threads of this process, from `start` to `stop`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Api)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.numbers = count(1)
        self.uses: dict[str, int] = {}  # valid tokens, with their numbers of requests

    def new_token(self) -> str:
        token = f"token-{Random().getrandbits(64):x}"
        self.uses[token] = 0
        return token

    def is_valid(self, token: str) -> bool:
        if token not in self.uses:
            return False
        self.uses[token] += 1
        return self.uses[token] <= USES

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log lost connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    Server(8080).serve_forever()
