"""Writes the answers that the page would ask for: one HTML file that needs nothing else, or a
folder for any web server. The newest trees go in first; the rest is left out, and said."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path

from agentenv.disk import naming, write_whole
from agentenv.errors import ConfigError, DataError
from agentenv.pipelines.viewing.api import encode, static
from agentenv.pipelines.viewing.evaluations import CHUNK
from agentenv.pipelines.viewing.folder import Folder

FILE_SUFFIXES = (".html", ".htm")
MAX_COMPARED = 6  # evaluations, of which each is compared with each
ROWS_SHARE = 0.4  # of the space, for the rows of the evaluations of a run
GOLDEN = (5**0.5 - 1) / 2
DATA = "data"
_LINK = '<link rel="stylesheet" href="static/viewer.css">'
_SCRIPT = '<script src="static/viewer.js" defer></script>'


def export(folder: Folder, out: Path, max_mb: float) -> Iterator[str]:
    """Write OUT, and report it. Raises ConfigError if OUT is something else already."""
    is_file = out.suffix.lower() in FILE_SUFFIXES
    if out.is_dir() == is_file and out.exists():
        expected = "a file" if is_file else "a folder"
        raise ConfigError(f"{out} is there and not {expected}; choose another name")
    if not is_file and out.exists() and any(out.iterdir()) and not (out / "index.html").is_file():
        raise ConfigError(f"{out} is not empty and no export; choose another name")
    writer = _File(max_mb * 1e6) if is_file else _Files(out, max_mb * 1e6)
    left_out = _collect(folder, writer)
    when = time.strftime("%Y-%m-%d %H:%M")
    run = folder.run() | {"exported": {"when": when, "left_out": left_out}}
    writer.add("run", run, always=True)
    num_bytes = writer.finish(out)
    yield f"{out}: {num_bytes / 1e6:.1f} MB"
    for line in left_out:
        yield f"left out: {line}; --max-mb takes more"


def _collect(folder: Folder, writer: _Writer) -> list[str]:
    """Add the answers; descriptions of those that did not fit."""
    left_out = []
    writer.add("metrics", folder.metrics(), always=True)
    writer.add("log", folder.answer("log"), always=True)
    writer.add("steps", folder.trees.index(), always=True)
    steps = folder.trees.steps()
    evaluations = folder.evaluations()
    for key, one in evaluations.items():
        writer.add(f"evaluations/{key}", one.index(), always=True)
        with suppress(DataError):  # it has no row yet
            writer.add(f"evaluations/{key}/figures", one.figures(), always=True)
    for first, second in permutations(list(evaluations)[-MAX_COMPARED:], 2):
        path = f"compare/{first}/{second}"
        with suppress(DataError):  # they ask other questions
            writer.add(path, folder.answer(path), always=True)
    if num_rows := sum(_add_rows(folder, writer, key) for key in reversed(evaluations)):
        left_out.append(f"{num_rows} trajectories of evaluations")
    if num_trees := sum(_add_trees(folder, writer, step) for step in reversed(steps)):
        left_out.append(f"{num_trees} trees of earlier steps")
    return left_out


def _add_rows(folder: Folder, writer: _Writer, key: str) -> int:
    """Add the rows of an evaluation; how many did not fit."""
    one = folder.evaluation(key)
    num_rows = len(one.index()["rows"])
    num_chunks = -(-num_rows // CHUNK)
    share = ROWS_SHARE if folder.is_run else 1.0
    # those that fit are of all sets and kinds: rows of one stand together
    for place, number in enumerate(sorted(range(num_chunks), key=lambda one: one * GOLDEN % 1)):
        if not writer.add(f"evaluations/{key}/rows/{number}", one.chunk(number), share=share):
            return num_rows - place * CHUNK
    return 0


def _add_trees(folder: Folder, writer: _Writer, step: int) -> int:
    """Add the trees of a step; how many did not fit."""
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
    """Takes answers up to a size."""

    def __init__(self, max_bytes: float) -> None:
        self._left = self._max_bytes = max_bytes

    def add(self, path: str, answer: object, *, share: float = 1.0, always: bool = False) -> bool:
        """Whether it was taken: `always` is, and others within a share of the space."""
        data = self.packed(encode(answer))
        if not always and self._left - len(data) < (1 - share) * self._max_bytes:
            return False
        self._left -= len(data)
        self.put(path, data)
        return True

    def packed(self, data: bytes) -> bytes:
        """The data as it is written."""
        return data

    def put(self, path: str, data: bytes) -> None:
        """Write the answer to a path, or keep it for the end."""
        raise NotImplementedError

    def finish(self, out: Path) -> int:
        """Write the rest; the bytes of all."""
        raise NotImplementedError


class _File(_Writer):
    """One page with everything inside. Its policy names the script and the style by their hashes
    and allows nothing else, no connection either."""

    def __init__(self, max_bytes: float) -> None:
        super().__init__(max_bytes)
        self._parts: list[bytes] = []

    def packed(self, data: bytes) -> bytes:
        return base64.b64encode(gzip.compress(data, 6, mtime=0))

    def put(self, path: str, data: bytes) -> None:
        name = re.sub(r"[^A-Za-z0-9_./-]", "-", path).encode()  # as all paths are
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
    """A page, and a file for each answer."""

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
