"""The page of a run or an evaluation: served over HTTP, or exported.

The server is for one user on this machine and listens on loopback. Clients need the token in the
printed address: the page is opened with it and gets a cookie for later requests, which are all
read-only.

An export contains the responses that the page would request, in one self-contained HTML file. It
includes the newest trees first; the rest is left out, and reported.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import resources
from itertools import permutations
from pathlib import Path

from aiohttp import web

from agentenv.base.deadline import uncancelled
from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.offload import in_thread
from agentenv.base.secrets import SECRETS
from agentenv.endpoint.listener import Listener, encode, same_key
from agentenv.endpoint.messages import ApiError
from agentenv.lab.viewing.evaluations import CHUNK
from agentenv.lab.viewing.folder import Folder

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    **Listener.headers,
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {"viewer.js": "text/javascript", "viewer.css": "text/css"}  # of the folder `static`
NUM_AT_ONCE = 4  # responses that are computed concurrently


def static(name: str) -> bytes:
    """A built file of the page."""
    return resources.files("agentenv.lab.viewing").joinpath("static", name).read_bytes()


class FolderServer(Listener):
    """Serves the page of one run or evaluation. After `start`, it can be opened at `address`."""

    has_keys, headers = True, HEADERS

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self.folder = folder
        self.token = secrets.token_urlsafe(24)
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    async def start(self, port: int = 0) -> None:
        """Listen, as in `listen`."""
        gets = {"/": self._page, "/static/{name}": self._static, "/api/{path:.+}": self._answer}
        await self.listen(gets, {}, HOST, port)

    @property
    def cookie(self) -> str:
        """The cookie's name, with the port: cookies do not distinguish ports."""
        return f"agentenv-view-{self.port}"

    def check(self, http: web.Request) -> None:
        """The page's address has the token, later requests the cookie."""
        given = http.query.get("token") if http.path == "/" else None
        if not same_key(given or http.cookies.get(self.cookie, ""), self.token):
            text = "open the address that agentenv view printed: it contains a token"
            raise ApiError("no_key", text)

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
            body = await uncancelled(in_thread(self._encoded, request))
        return web.Response(body=body, content_type="application/json")

    def _encoded(self, request: web.Request) -> bytes:
        try:
            path, query = request.match_info["path"], dict(request.query)
            return SECRETS.encoded(encode(self.folder.answer(path, query)))
        except DataError as error:
            raise ApiError("no_route", str(error)) from error
        except OSError as error:
            raise ApiError("bug", f"{error.filename}: {error.strerror}") from error


async def serve(server: FolderServer, port: int, report: Callable[[str], None]) -> None:
    """Serve until cancelled. Raises ConfigError if the port is taken."""
    gc.freeze()  # there are many rows, without reference cycles: collect seldom
    gc.set_threshold(200_000, 20, 100)
    await server.start(port)
    try:
        report(f"{server.folder.path}: {server.address}")
        tunnel = f"ssh -L {server.port}:{HOST}:{server.port} THIS_HOST"
        report(
            f"Ctrl-C stops the server; from another machine: {tunnel}, then open the same address"
        )
        await asyncio.Event().wait()
    finally:
        await server.close()


# Exports of the page.

MAX_COMPARED = 6  # number of evaluations with pairwise comparisons
ROWS_SHARE = 0.4  # share of the size limit for rows of evaluations, in the export of a run
GOLDEN = (5**0.5 - 1) / 2
_LINK = '<link rel="stylesheet" href="static/viewer.css">'
_SCRIPT = '<script src="static/viewer.js" defer></script>'


def export(folder: Folder, out: Path, max_mb: float) -> Iterator[str]:
    """Write the file OUT; yields lines to report. Raises ConfigError if OUT is a folder."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; --export takes the name of a file, such as run.html")
    page = _Page(max_mb * 1e6)
    left_out = _collect(folder, page)
    when = time.strftime("%Y-%m-%d %H:%M")
    run = folder.run() | {"exported": {"when": when, "left_out": left_out}}
    page.add("run", run, always=True)
    data = page.written()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, data)
    yield f"{out}: {len(data) / 1e6:.1f} MB"
    for line in left_out:
        yield f"left out: {line}; raise --max-mb to include more"


def _collect(folder: Folder, page: _Page) -> list[str]:
    """Add the responses; returns descriptions of those that did not fit."""
    left_out = []
    page.add("metrics", folder.metrics(), always=True)
    page.add("log", folder.answer("log"), always=True)
    page.add("steps", folder.trees.index(), always=True)
    steps = folder.trees.steps()
    evaluations = folder.evaluations()
    for key, one in evaluations.items():
        page.add(f"evaluations/{key}", one.index(), always=True)
        with suppress(DataError):  # there are no rows yet
            page.add(f"evaluations/{key}/figures", one.figures(), always=True)
    for first, second in permutations(list(evaluations)[-MAX_COMPARED:], 2):
        path = f"compare/{first}/{second}"
        with suppress(DataError):  # they have different questions
            page.add(path, folder.answer(path), always=True)
    if num_rows := sum(_add_rows(folder, page, key) for key in reversed(evaluations)):
        left_out.append(f"{num_rows} trajectories of evaluations")
    if num_trees := sum(_add_trees(folder, page, step) for step in reversed(steps)):
        left_out.append(f"{num_trees} trees of earlier steps")
    return left_out


def _add_rows(folder: Folder, page: _Page, key: str) -> int:
    """Add the rows of an evaluation; returns the number of rows that did not fit."""
    one = folder.evaluation(key)
    num_rows = len(one.index()["rows"])
    num_chunks = -(-num_rows // CHUNK)
    share = ROWS_SHARE if folder.is_run else 1.0
    # spread the chunks over all sets and kinds, whose rows are adjacent
    for place, number in enumerate(sorted(range(num_chunks), key=lambda one: one * GOLDEN % 1)):
        if not page.add(f"evaluations/{key}/rows/{number}", one.chunk(number), share=share):
            return num_rows - place * CHUNK
    return 0


def _add_trees(folder: Folder, page: _Page, step: int) -> int:
    """Add the trees of a step; returns the number of trees that did not fit."""
    try:
        details = folder.trees.step(step)
    except DataError:  # damaged
        return 0
    page.add(f"steps/{step}", details, always=True)
    trees = [one["tree"] for one in details["trees"] if "damaged" not in one]
    for place, tree in enumerate(trees):
        if not page.add(f"steps/{step}/trees/{tree}", folder.trees.tree(step, tree)):
            return len(trees) - place
    return 0


class _Page:
    """A self-contained page with responses up to a size limit. Its content security policy allows
    only the script and the style, by hash, and no connections."""

    def __init__(self, max_bytes: float) -> None:
        self._left = self._max_bytes = max_bytes
        self._parts: list[bytes] = []

    def add(self, path: str, answer: object, *, share: float = 1.0, always: bool = False) -> bool:
        """Add a response if it fits, or `always`; `share`: the usable share of the size limit.
        Returns whether it was added."""
        data = base64.b64encode(gzip.compress(SECRETS.encoded(encode(answer)), 6, mtime=0))
        if not always and self._left - len(data) < (1 - share) * self._max_bytes:
            return False
        self._left -= len(data)
        name = re.sub(r"[^A-Za-z0-9_./-]", "-", path).encode()
        self._parts.append(b'<script type="text/plain" data-path="%s">%s</script>\n' % (name, data))
        return True

    def written(self) -> bytes:
        """The page."""
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
        return b"".join([before.encode(), *self._parts, after.encode()])


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
