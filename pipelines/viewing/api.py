"""The page and its answers over HTTP, for one person on this machine.

Listens on loopback. Whoever asks has to know the token of the address that was printed: the page
is opened with it and gets a cookie for later requests. A request that names another host, or
comes from a page of another origin, is refused. Nothing can be changed through it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import subprocess
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agentenv.errors import ConfigError, DataError
from agentenv.guard import guarded
from agentenv.link import hold_port, port_of
from agentenv.offload import in_thread
from agentenv.pipelines.viewing.folder import Folder

HOST = "127.0.0.1"
COMMAND = ("-m", "agentenv.launchers.view")
GRACE_S = 1.0
END_S = 5.0  # for the process of a viewer beside a run
TOKEN_VARIABLE = "AGENTENV_VIEW_TOKEN"  # of the environment: the token, if the caller chose it
NAMES = (HOST, "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {"viewer.js": "text/javascript", "viewer.css": "text/css"}  # of the folder `static`
NUM_AT_ONCE = 4  # answers that are computed at the same time
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def address_of(port: int, token: str) -> str:
    return f"http://{HOST}:{port}/?token={token}"


def static(name: str) -> bytes:
    """A file of the page, as it was built."""
    return resources.files("agentenv.pipelines.viewing").joinpath("static", name).read_bytes()


class Server:
    """Serves one folder; `address` is to be opened once it has started."""

    def __init__(self, folder: Folder, port: int = 0) -> None:
        self.folder = folder
        self.port = port
        self.token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return address_of(self.port, self.token)

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/api/{path:.+}", self._answer)
        return app

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        self._runner = web.AppRunner(self.app(), access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def cookie(self) -> str:
        """Its name; cookies do not know ports."""
        return f"agentenv-view-{self.port}"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self._refusal(request)
        try:
            response = refused or await handler(request)
        except web.HTTPException as error:
            response = web.Response(text=error.text, status=error.status)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        own = {f"{name}:{self.port}" for name in NAMES}
        if request.host not in own:
            return web.Response(text=f"this is not {request.host}\n", status=421)
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if (origin is not None and origin not in {f"http://{one}" for one in own}) or (
            site not in ("none", "same-origin")
            # a link on another page may lead here, but nothing of it may load from here
            and request.headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            return web.Response(text="another page may not ask\n", status=403)
        given = request.query.get("token") if request.path == "/" else None
        given = given or request.cookies.get(self.cookie, "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            text = "open the address that agentenv view has printed: it holds a token\n"
            return web.Response(text=text, status=403)
        return None

    async def _page(self, request: web.Request) -> web.Response:
        page = await in_thread(static, "index.html")
        response = web.Response(body=page, content_type="text/html")
        response.charset = "utf-8"
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict")
        return response

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        body = await in_thread(static, name)
        return web.Response(body=body, content_type=STATIC[name], charset="utf-8")

    async def _answer(self, request: web.Request) -> web.Response:
        async with self._slots:
            status, body = await in_thread(
                self._encoded, request.match_info["path"], dict(request.query)
            )
        return web.Response(body=body, status=status, content_type="application/json")

    def _encoded(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        try:
            return 200, encode(self.folder.answer(path, query))
        except DataError as error:
            return 404, encode({"error": str(error)})
        except OSError as error:
            return 500, encode({"error": f"{error.filename}: {error.strerror}"})


def encode(answer: Any) -> bytes:
    """JSON, in which nan is null; values without a form there are texts."""
    return msgspec.json.encode(answer, enc_hook=str)


async def serve(folder: Folder, port: int, say: Callable[[str], None], *, opens: bool) -> None:
    """Serve until cancelled. Raises ConfigError if the port is taken."""
    server = Server(folder, port)
    gc.freeze()  # rows are many and none refers to another: few looks for cycles
    gc.set_threshold(200_000, 20, 100)
    try:
        await server.start()
    except OSError as error:
        raise ConfigError(
            f"port {port} of {HOST} cannot be had: {error.strerror}; --port 0 takes a free one"
        ) from error
    try:
        say(f"{folder.path}: {server.address}")
        tunnel = f"ssh -L {server.port}:{HOST}:{server.port} THIS_HOST"
        say(f"Ctrl-C ends it; from another machine: {tunnel}, then the same address there")
        if opens:
            await in_thread(webbrowser.open, server.address)
        await asyncio.Event().wait()
    finally:
        await server.close()


@contextmanager
def viewed(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve a run that has just been started from a process of its own, and say its address. That
    process ends with this one, however this one ends; when it fails, the run goes on without."""
    token = secrets.token_urlsafe(24)
    with hold_port() as held:
        command = [sys.executable, *COMMAND, str(run.resolve()), "--awaited"]
        process = subprocess.Popen(
            guarded([*command, "--port", str(port_of(held))], GRACE_S),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {TOKEN_VARIABLE: token},
            start_new_session=True,
        )
        say(f"to look at it: {address_of(port_of(held), token)}")
        try:
            yield
        finally:
            if process.stdin is not None:
                process.stdin.close()  # which ends it
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            say(f"to look at it again: agentenv view {run}")
