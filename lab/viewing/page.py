"""The page of a run or an evaluation: served over HTTP, or exported.

The server is for one user on this machine and listens on loopback. Clients need the token in the
printed address: the page is opened with it and gets a cookie for later requests. A request with
another host, or from a page of another origin, is rejected. All requests are read-only.

An export contains the responses that the page would request: one self-contained HTML file, or a
folder for any web server. It includes the newest trees first; the rest is left out, and reported.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import hashlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agentenv.base.disk import naming, write_whole
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.offload import in_thread
from agentenv.lab.viewing.evaluations import CHUNK
from agentenv.lab.viewing.folder import Folder
from agentenv.processes.guard import guarded
from agentenv.processes.ports import hold_port, port_of

HOST = "127.0.0.1"
COMMAND = ("-m", "agentenv.launchers.view")
GRACE_S = 1.0
END_S = 5.0  # for the viewer process of a run to end
TOKEN_VARIABLE = "AGENTENV_VIEW_TOKEN"  # environment variable: the token, if the caller chose it
NAMES = (HOST, "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
NUM_AT_ONCE = 4  # responses that are computed concurrently
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def address_of(port: int, token: str) -> str:
    return f"http://{HOST}:{port}/?token={token}"


def static(name: str) -> bytes:
    """A built file of the page."""
    return resources.files("agentenv.lab.viewing").joinpath("static", name).read_bytes()


class PageServer:
    """Serves a page of the folder `path`. After `start`, it can be opened at `address`."""

    def __init__(self, path: Path, port: int = 0) -> None:
        self.path = path
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
        """Stop the server; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def cookie(self) -> str:
        """The cookie's name, with the port: cookies do not distinguish ports."""
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
        hosts = {f"{name}:{self.port}" for name in NAMES}
        if request.host not in hosts:
            return web.Response(text=f"this is not {request.host}\n", status=421)
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        if (origin is not None and origin not in {f"http://{one}" for one in hosts}) or (
            site not in ("none", "same-origin")
            # other pages may link to this one, but not load content from it
            and request.headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            return web.Response(text="requests from other pages are rejected\n", status=403)
        given = request.query.get("token") if request.path == "/" else None
        given = given or request.cookies.get(self.cookie, "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            text = "open the address that agentenv view printed: it contains a token\n"
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
            status, body = await in_thread(self._encoded, request)
        return web.Response(body=body, status=status, content_type="application/json")

    def _folder(self, request: web.Request) -> Folder:
        """The folder of a request. Raises DataError."""
        raise NotImplementedError

    def _encoded(self, request: web.Request) -> tuple[int, bytes]:
        try:
            path, query = request.match_info["path"], dict(request.query)
            return 200, encode(self._folder(request).answer(path, query))
        except DataError as error:
            return 404, encode({"error": str(error)})
        except OSError as error:
            return 500, encode({"error": f"{error.filename}: {error.strerror}"})


class FolderServer(PageServer):
    """Serves the page of one run or evaluation."""

    def __init__(self, folder: Folder, port: int = 0) -> None:
        super().__init__(folder.path, port)
        self.folder = folder

    def _folder(self, request: web.Request) -> Folder:
        return self.folder


def encode(answer: Any) -> bytes:
    """The answer as JSON; nan becomes null, and values of other types become texts."""
    return msgspec.json.encode(answer, enc_hook=str)


async def serve(server: PageServer, report: Callable[[str], None]) -> None:
    """Serve until cancelled. Raises ConfigError if the port is taken."""
    gc.freeze()  # there are many rows, without reference cycles: collect seldom
    gc.set_threshold(200_000, 20, 100)
    try:
        await server.start()
    except OSError as error:
        raise ConfigError(
            f"port {server.port} of {HOST} is not available: {error.strerror}; --port 0 chooses a "
            "free one"
        ) from error
    try:
        report(f"{server.path}: {server.address}")
        tunnel = f"ssh -L {server.port}:{HOST}:{server.port} THIS_HOST"
        report(
            f"Ctrl-C stops the server; from another machine: {tunnel}, then open the same address"
        )
        await asyncio.Event().wait()
    finally:
        await server.close()


@contextmanager
def viewed(run: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Inside, serve a run that has just started from a separate process, and print the address.
    That process always ends with this one; if it fails, the run continues without it."""
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
        report(f"view it at {address_of(port_of(held), token)}")
        try:
            yield
        finally:
            if process.stdin is not None:
                process.stdin.close()  # ends the process
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            report(f"to view it again: agentenv view {run}")


# Exports of the page.

FILE_SUFFIXES = (".html", ".htm")
MAX_COMPARED = 6  # number of evaluations with pairwise comparisons
ROWS_SHARE = 0.4  # share of the size limit for rows of evaluations, in the export of a run
GOLDEN = (5**0.5 - 1) / 2
DATA = "data"
_LINK = '<link rel="stylesheet" href="static/viewer.css">'
_SCRIPT = '<script src="static/viewer.js" defer></script>'


def export(folder: Folder, out: Path, max_mb: float) -> Iterator[str]:
    """Write OUT; yields lines to report. Raises ConfigError if OUT is something else already."""
    is_file = out.suffix.lower() in FILE_SUFFIXES
    if out.is_dir() == is_file and out.exists():
        expected = "a file" if is_file else "a folder"
        raise ConfigError(f"{out} exists and is not {expected}; choose another name")
    if not is_file and out.exists() and any(out.iterdir()) and not (out / "index.html").is_file():
        raise ConfigError(f"{out} is not empty and not an export; choose another name")
    writer = _File(max_mb * 1e6) if is_file else _Files(out, max_mb * 1e6)
    left_out = _collect(folder, writer)
    when = time.strftime("%Y-%m-%d %H:%M")
    run = folder.run() | {"exported": {"when": when, "left_out": left_out}}
    writer.add("run", run, always=True)
    num_bytes = writer.finish(out)
    yield f"{out}: {num_bytes / 1e6:.1f} MB"
    for line in left_out:
        yield f"left out: {line}; raise --max-mb to include more"


def _collect(folder: Folder, writer: _Writer) -> list[str]:
    """Add the responses; returns descriptions of those that did not fit."""
    left_out = []
    writer.add("metrics", folder.metrics(), always=True)
    writer.add("log", folder.answer("log"), always=True)
    writer.add("steps", folder.trees.index(), always=True)
    steps = folder.trees.steps()
    evaluations = folder.evaluations()
    for key, one in evaluations.items():
        writer.add(f"evaluations/{key}", one.index(), always=True)
        with suppress(DataError):  # there are no rows yet
            writer.add(f"evaluations/{key}/figures", one.figures(), always=True)
    for first, second in permutations(list(evaluations)[-MAX_COMPARED:], 2):
        path = f"compare/{first}/{second}"
        with suppress(DataError):  # they have different questions
            writer.add(path, folder.answer(path), always=True)
    if num_rows := sum(_add_rows(folder, writer, key) for key in reversed(evaluations)):
        left_out.append(f"{num_rows} trajectories of evaluations")
    if num_trees := sum(_add_trees(folder, writer, step) for step in reversed(steps)):
        left_out.append(f"{num_trees} trees of earlier steps")
    return left_out


def _add_rows(folder: Folder, writer: _Writer, key: str) -> int:
    """Add the rows of an evaluation; returns the number of rows that did not fit."""
    one = folder.evaluation(key)
    num_rows = len(one.index()["rows"])
    num_chunks = -(-num_rows // CHUNK)
    share = ROWS_SHARE if folder.is_run else 1.0
    # spread the chunks over all sets and kinds, whose rows are adjacent
    for place, number in enumerate(sorted(range(num_chunks), key=lambda one: one * GOLDEN % 1)):
        if not writer.add(f"evaluations/{key}/rows/{number}", one.chunk(number), share=share):
            return num_rows - place * CHUNK
    return 0


def _add_trees(folder: Folder, writer: _Writer, step: int) -> int:
    """Add the trees of a step; returns the number of trees that did not fit."""
    try:
        details = folder.trees.step(step)
    except DataError:  # damaged
        return 0
    writer.add(f"steps/{step}", details, always=True)
    trees = [one["tree"] for one in details["trees"] if "damaged" not in one]
    for place, tree in enumerate(trees):
        if not writer.add(f"steps/{step}/trees/{tree}", folder.trees.tree(step, tree)):
            return len(trees) - place
    return 0


class _Writer:
    """Collects responses up to a size limit."""

    def __init__(self, max_bytes: float) -> None:
        self._left = self._max_bytes = max_bytes

    def add(self, path: str, answer: object, *, share: float = 1.0, always: bool = False) -> bool:
        """Add a response if it fits, or `always`; `share`: the usable share of the size limit.
        Returns whether it was added."""
        data = self.packed(encode(answer))
        if not always and self._left - len(data) < (1 - share) * self._max_bytes:
            return False
        self._left -= len(data)
        self.put(path, data)
        return True

    def packed(self, data: bytes) -> bytes:
        """The data in the format of the export."""
        return data

    def put(self, path: str, data: bytes) -> None:
        """Write the response to a path, or keep it for `finish`."""
        raise NotImplementedError

    def finish(self, out: Path) -> int:
        """Write the rest; returns the total number of bytes."""
        raise NotImplementedError


class _File(_Writer):
    """A single self-contained page. Its content security policy allows only the script and the
    style, by hash, and no connections."""

    def __init__(self, max_bytes: float) -> None:
        super().__init__(max_bytes)
        self._parts: list[bytes] = []

    def packed(self, data: bytes) -> bytes:
        return base64.b64encode(gzip.compress(data, 6, mtime=0))

    def put(self, path: str, data: bytes) -> None:
        name = re.sub(r"[^A-Za-z0-9_./-]", "-", path).encode()
        self._parts.append(b'<script type="text/plain" data-path="%s">%s</script>\n' % (name, data))

    def finish(self, out: Path) -> int:
        style, script, page = (
            static(name).decode() for name in ("viewer.css", "viewer.js", "index.html")
        )
        policy = (
            f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )
        meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        for old, new in (
            ('<meta charset="utf-8">', f'<meta charset="utf-8">\n    {meta}'),
            (_LINK, f"<style>{style}</style>"),
            ('data-source="server"', 'data-source="file"'),
            (_SCRIPT, f"@data@<script>{script}</script>"),
        ):
            assert old in page, old
            page = page.replace(old, new)
        before, after = page.split("@data@", 1)
        data = b"".join([before.encode(), *self._parts, after.encode()])
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)
        return len(data)


class _Files(_Writer):
    """A page, and a file per response."""

    def __init__(self, out: Path, max_bytes: float) -> None:
        super().__init__(max_bytes)
        self._out, self._num_bytes = out, 0

    def put(self, path: str, data: bytes) -> None:
        self._write(f"{DATA}/{path}.json", data)

    def finish(self, out: Path) -> int:
        page = static("index.html").replace(b'data-source="server"', b'data-source="folder"')
        self._write("index.html", page)
        for name in ("viewer.css", "viewer.js"):
            self._write(f"static/{name}", static(name))
        return self._num_bytes

    def _write(self, name: str, data: bytes) -> None:
        path = self._out / name
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._num_bytes += len(data)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
