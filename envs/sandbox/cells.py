"""Part of the zygote: runs the cells of one session, and talks to the host about them."""

from __future__ import annotations

import ast
import io
import json
import linecache
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import determinism
else:  # inside, these files are all there is
    import determinism

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
MAX_ERROR_CHARS = 2000
SMALLEST_NEED_BYTES = 4 << 20
FLOOD_FACTOR = 500  # a cell that writes this many times the output limit is stopped


def serve(
    fd: int, scope: dict[str, Any], max_chars: int, home: str | None, fork: Callable[[], int]
) -> None:
    """Answer request after request until the host closes its end: run a cell, fork, or give the
    digest of the variables and of the files below `home`."""
    num_cells = 0
    while (request := receive(fd)) is not None:
        if "code" in request:
            num_cells += 1
            output, problem = run_cell(request["code"], scope, num_cells, max_chars)
            for timer in TIMERS:  # what one cell set must not interrupt another
                signal.setitimer(timer, 0)
            lost = problem == "MemoryError" and not _memory_left()
            answer = {"output": _printable(output), "problem": _printable(problem), "lost": lost}
        elif "fork" in request:
            pid = fork()
            if pid == 0:  # another host's end belongs to fd by now
                continue
            answer = {"forked": pid > 0}
        else:
            answer = {"digest": determinism.digest(scope, home)}
        send(fd, {**answer, "number": request["number"]})


def _memory_left() -> bool:
    """Whether another cell could run beside all that the variables hold."""
    try:
        return bool(bytearray(SMALLEST_NEED_BYTES))
    except MemoryError:
        return False


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class _Output(io.TextIOBase):
    """Keeps head and tail of what is written, in bounded memory."""

    def __init__(self, max_chars: int) -> None:
        self.half = max_chars // 2
        self.total = 0
        self.head = ""
        self.parts: list[str] = []
        self.num_pending = 0

    def write(self, text: str) -> int:
        self.parts.append(text)
        self.total += len(text)
        self.num_pending += len(text)
        if self.num_pending > 8 * self.half:
            self._compact()
        if self.total > 2 * self.half * FLOOD_FACTOR:
            raise RuntimeError("too much output")
        return len(text)

    @property
    def buffer(self) -> _Bytes:
        return _Bytes(self)

    def _compact(self) -> None:
        text = "".join(self.parts)
        room = self.half - len(self.head)
        self.head += text[:room]
        self.parts = [text[room:][-self.half :]]
        self.num_pending = len(self.parts[0])

    def text(self) -> str:
        self._compact()
        num_left_out = self.total - len(self.head) - self.num_pending
        gap = f"\n... {num_left_out} characters left out ...\n" if num_left_out > 0 else ""
        return (self.head + gap + self.parts[0]).rstrip("\n")


class _Bytes(io.RawIOBase):
    """What the standard output is below its text."""

    def __init__(self, output: _Output) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(data).decode("utf-8", "backslashreplace"))
        return len(data)


def run_cell(code: str, scope: dict[str, Any], number: int, max_chars: int) -> tuple[str, str]:
    """Run one cell like a REPL: what the cell wrote, and what went wrong ("" if nothing)."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    output = _Output(max_chars)
    sys.stdout = sys.stderr = output
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
            if value is not None:
                output.write(f"{value!r}\n")
    except MemoryError:
        problem = "MemoryError"  # there may be none left to say more
    except SystemExit as error:
        problem = f"SystemExit: {error.code}" if error.code else ""
    except BaseException as error:  # the boundary: whatever a cell raises is its result
        problem = _traceback_end(error)
    else:
        problem = ""
    return output.text(), problem


def _traceback_end(error: BaseException) -> str:
    """The traceback without our own frames; only the innermost ones when there are many."""
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell"):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames, limit=-5)).rstrip()
    return text if len(text) <= MAX_ERROR_CHARS else "..." + text[-MAX_ERROR_CHARS:]


def send(fd: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> dict[str, Any] | None:
    header = _read(fd, 4)
    message = _read(fd, struct.unpack("!I", header)[0]) if header else b""
    return json.loads(message) if message else None


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return b""
        data += piece
    return data
