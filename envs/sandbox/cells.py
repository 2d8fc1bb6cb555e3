"""Part of the zygote: runs the cells of one session, and reports them to the host.

Runs of the same cells are made deterministic, and a digest checks it. Time is not deterministic:
cells that read the clock leave different variables, which the digest detects.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import json
import linecache
import os
import pickle
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
MAX_ERROR_CHARS = 2000
SMALLEST_NEED_BYTES = 4 << 20
OUT_OF_TIME = "TimeoutError: the calls have used all their CPU time (python.limits.cpu_s)"
FLOOD_FACTOR = 500  # a cell that writes this many times the output limit is stopped


def serve(
    fd: int, scope: dict[str, Any], max_chars: int, home: str | None, fork: Callable[[], int]
) -> None:
    """Answer requests until the host closes its end: run a cell, fork, or return the digest of the
    variables and of the files below `home`."""
    num_cells, requests = 0, os.fdopen(fd, "rb", closefd=False)
    signal.signal(signal.SIGXCPU, _out_of_time)
    while (request := receive(requests)) is not None:
        if "code" in request:
            num_cells += 1
            output, problem = run_cell(request["code"], scope, num_cells, max_chars)
            for timer in TIMERS:  # timers of one cell must not interrupt another
                signal.setitimer(timer, 0)
            lost = problem == OUT_OF_TIME or (problem == "MemoryError" and not _memory_left())
            answer = {"output": _printable(output), "problem": _printable(problem), "lost": lost}
        elif "fork" in request:
            pid = fork()
            if pid == 0:  # fd now belongs to another end of the host
                continue
            answer = {"forked": pid > 0}
        else:
            answer = {"digest": digest(scope, home)}
        send(fd, {**answer, "number": request["number"]})


class OutOfTime(BaseException):
    """The CPU time of all calls is used up."""


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def _memory_left() -> bool:
    """Whether the memory suffices for another cell in addition to the variables."""
    try:
        return bool(bytearray(SMALLEST_NEED_BYTES))
    except MemoryError:
        return False


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class _Output(io.TextIOBase):
    """Keeps head and tail of the output, in bounded memory."""

    def __init__(self, max_chars: int) -> None:
        self.half = max_chars // 2
        self.head = self.tail = ""
        self.total = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str | bytes) -> int:
        size = len(text)
        if not isinstance(text, str):
            text = bytes(text).decode("utf-8", "backslashreplace")
        room = self.half - len(self.head)
        self.head += text[:room]
        self.tail = (self.tail + text[room:])[-self.half :]
        self.total += len(text)
        if self.total > 2 * self.half * FLOOD_FACTOR:
            raise RuntimeError("too much output")
        return size

    @property
    def buffer(self) -> _Output:
        """The binary layer: `write` also takes bytes."""
        return self

    def text(self) -> str:
        num_left_out = self.total - len(self.head) - len(self.tail)
        gap = f"\n... {num_left_out} characters left out ...\n" if num_left_out > 0 else ""
        return (self.head + gap + self.tail).rstrip("\n")


def run_cell(code: str, scope: dict[str, Any], number: int, max_chars: int) -> tuple[str, str]:
    """Run one cell like a REPL; returns its output, and the error ("" if none)."""
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
        problem = "MemoryError"  # there may be no memory for more text
    except OutOfTime:
        problem = OUT_OF_TIME
    except SystemExit as error:
        problem = f"SystemExit: {error.code}" if error.code else ""
    except BaseException as error:  # the boundary: any exception of a cell is its result
        problem = _traceback_end(error)
    else:
        problem = ""
    return output.text(), problem


def prelude(code: str, max_chars: int) -> tuple[types.ModuleType, str]:
    """The main module of all sessions, with the names that `code` sets; and its error."""
    scope = types.ModuleType("__main__")
    vars(scope)["__builtins__"] = builtins
    if not code:
        return scope, ""
    seed_all(0)  # equal names after a restart of the sandbox, which replays need
    _, problem = run_cell(code, vars(scope), 0, max_chars)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return scope, problem


def _traceback_end(error: BaseException) -> str:
    """The traceback without the sandbox's frames; only the innermost ones if there are many."""
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


def receive(requests: BinaryIO) -> dict[str, Any] | None:
    header = requests.read(4)
    return json.loads(requests.read(struct.unpack("!I", header)[0])) if header else None


# Deterministic runs: seeds, and the digest of a session's state.

NOT_STATE = ("__builtins__",)  # of the main module
# attributes of a class that are not state, or cannot be inspected
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)
_METHODS = (staticmethod, classmethod)
_MACHINERY = ("__dict__", "__weakref__", "_abc_impl", "__doc__")


class _Source:
    """The source of a session's randomness, which replaces the operating system's."""

    state: Any = None  # a random.Random, once seeded


def seed_all(seed: int) -> None:
    """Seed the generators that code uses without an explicit seed, and replace system entropy.

    Modules that are imported later (numpy's generators, uuid, secrets, tempfile) use it too.
    """
    import random

    source = _Source.state = random.Random(f"entropy of session {seed}")
    seed_from = random.Random.seed

    def urandom(size: int) -> bytes:
        if size < 0:
            raise ValueError("negative argument not allowed")
        return source.randbytes(size)

    def getrandom(size: int, flags: int = 0) -> bytes:
        return urandom(size)

    def reseed(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed_from(self, source.getrandbits(256) if a is None else a, version)

    os.urandom, os.getrandom = urandom, getrandom
    random._urandom = urandom  # type: ignore[attr-defined]
    random.Random.seed = reseed  # type: ignore[method-assign]
    random.seed = random._inst.seed  # the module kept the old one
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def digest(scope: dict[str, Any], home: str | None) -> str:
    """A digest of variables, generators and files below `home`, equal for equal states.

    For objects that cannot be pickled only the type counts: modules, locks, open files.
    """
    sink = _Sink()
    for name in sorted(scope, key=str):
        if name not in NOT_STATE:
            sink.add(name, scope[name])
    sink.add("generator", sys.modules["random"].getstate() if "random" in sys.modules else None)
    if "numpy" in sys.modules:
        sink.add("numpy's generator", sys.modules["numpy"].random.get_state())
    if _Source.state is not None:
        sink.add("entropy", _Source.state.getstate())
    for path, content in _files(home) if home else ():
        sink.add(path, content)
    return sink.hash.hexdigest()


def _files(home: str) -> Iterator[tuple[str, bytes | str]]:
    for folder, folders, names in os.walk(home):
        folders[:] = [one for one in sorted(folders) if not os.path.ismount(f"{folder}/{one}")]
        yield folder, ""
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                yield path, os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    yield path, file.read()


class _Sink:
    """A sink for a pickler, which keeps only a hash."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.write = self.hash.update

    def add(self, name: str, value: Any) -> None:
        self.hash.update(f"\0{name}\0{type(value).__qualname__}\0".encode("utf-8", "replace"))
        try:
            _Pickler(self, protocol=5).dump(value)
        except BaseException as error:  # the boundary: a variable's own code may raise anything
            self.hash.update(type(error).__name__.encode())


class _Pickler(pickle.Pickler):
    """Also writes functions, classes and generators of the session, which pickle cannot.

    The data are never loaded, so that any function can replace their constructor; it is `str`.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return str, (value.__name__,)
        if isinstance(value, _METHODS):
            return str, ("method",), value.__func__
        if isinstance(value, property):
            return str, ("property",), [value.fget, value.fset, value.fdel]
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            place = (value.__qualname__, frame.f_lasti if frame else -1)
            return str, place, dict(frame.f_locals) if frame else None
        if getattr(value, "__module__", None) != "__main__":
            return NotImplemented
        if isinstance(value, types.FunctionType):
            code = value.__code__
            cells = [_content(cell) for cell in value.__closure__ or ()]
            state = [value.__defaults__, value.__kwdefaults__, cells, value.__dict__]
            values = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
            where = (code.co_filename, str(code.co_firstlineno), code.co_code, *values)
            return str, (value.__qualname__, *where), state
        if isinstance(value, type):
            attributes = {
                name: attribute
                for name, attribute in vars(value).items()
                if name not in _MACHINERY and not isinstance(attribute, _DESCRIPTORS)
            }
            return str, (value.__qualname__, *value.__bases__), attributes
        return NotImplemented


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
