"""Part of the zygote: makes two runs of the same cells equal, and shows whether they were.

Time is not made equal: what read the clock has other variables, which the digest shows.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

NOT_STATE = ("__builtins__",)  # of the main module
# attributes of a class that are not its state, or cannot be looked into
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)
_METHODS = (staticmethod, classmethod)
_MACHINERY = ("__dict__", "__weakref__", "_abc_impl", "__doc__")


class _Source:
    """Where a session's randomness comes from, in place of the operating system."""

    state: Any = None  # a random.Random, once seeded


def seed_all(seed: int) -> None:
    """Seed the generators that code uses without a seed of its own, and the system's entropy.

    What is imported later (numpy's generators, uuid, secrets, tempfile) draws from the same.
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
    """Equal for two sessions whose variables, generators and files below `home` are equal.

    Of what cannot be pickled only the type counts: modules, locks, open files.
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
    """What a pickler writes to: nothing is kept but a hash."""

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
    """Writes also what pickle cannot: functions, classes, generators of the session.

    Nobody ever reads it, so that any function can stand for the one that would make them; `str`.
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
