"""Atomic, crash-safe writes of files and folders; and temporary folders of a process, which the
next process removes after a crash.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from agentenv.base.secrets import SECRETS

PARTIAL, OLD = ".partial", ".old"


def write_whole(path: Path, data: str | bytes | Iterable[bytes], *, durable: bool = False) -> None:
    """Write a file under a temporary name and rename it, so that readers never see a partial file.

    Text is written as UTF-8, without secrets. A `durable` file is synced before the rename, and its
    name is synced afterwards: both survive a crash of the machine. A failure leaves nothing behind.
    Raises OSError.
    """
    pieces = [data] if isinstance(data, str | bytes) else data
    partial = path.with_name(path.name + PARTIAL)
    with naming(path):
        with removing(partial):
            with partial.open("wb") as file:
                file.writelines(map(SECRETS.encoded, pieces))
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        if durable:
            sync(path.parent)


def append_whole(path: Path, data: str | bytes) -> None:
    """Append all of `data` to a file, without secrets, or nothing; the file must have a single
    writer. Raises OSError."""
    view = memoryview(SECRETS.encoded(data))
    with naming(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while view:
                view = view[file.write(view) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)
            raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; their names survive a crash of the machine. Raises
    OSError."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in made:
        sync(one.parent)


@contextmanager
def removing(*paths: Path) -> Iterator[None]:
    """Remove these files if the block fails: the disk may be full, and other writes need the
    space."""
    try:
        yield
    except BaseException:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within the block, an OSError such as a full disk names this file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_folder(partial: Path, folder: Path) -> None:
    """Give the complete folder `partial` the name `folder`, in place of an older one, durably.

    A crash between the two renames leaves the older one as FOLDER.old; see `finished_folder`.
    Raises OSError.
    """
    for inside in partial.rglob("*"):
        sync(inside)
    sync(partial)
    old = folder.with_name(folder.name + OLD)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def finished_folder(folder: Path) -> Path:
    """The folder, or FOLDER.old if a crash interrupted `replace_folder`."""
    old = folder.with_name(folder.name + OLD)
    return old if old.is_dir() and not folder.exists() else folder


def remove_left(place: Path, prefix: str) -> None:
    """Remove folders of `own_folder` without a lock, whose processes were killed; does nothing on a
    file system without locks."""
    for left in place.glob(f"{prefix}*"):
        with suppress(OSError), locked(left, fcntl.LOCK_NB):
            shutil.rmtree(left)


@contextmanager
def own_folder(place: Path | None, prefix: str) -> Iterator[Path]:
    """A folder of this process in `place` (default: the folder of temporary files), which it locks
    before the folder gets its name. Leftovers of killed processes are removed first."""
    remove_left(Path(place or tempfile.gettempdir()), prefix)
    own = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
    try:
        with ExitStack() as lock:
            with suppress(OSError):  # no locks on this file system
                lock.enter_context(locked(own))
            own = own.rename(own.with_name(own.name[1:]))
            yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


@contextmanager
def locked(folder: Path, more: int = 0) -> Iterator[None]:
    """Hold the lock of a folder during the block. Raises OSError on a file system without locks
    and, with LOCK_NB, BlockingIOError if another process holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | more)
        yield
    finally:
        os.close(held)


@contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """A path of a Unix socket below the system's limit of 107 bytes, however long its own."""
    folder = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def undecodable(text: str) -> str:
    """A text such as a path with its invalid UTF-8 bytes escaped, as \\xff; empty if it has none.
    Python decodes them to lone surrogates, which neither logs nor JSON can represent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        with suppress(UnicodeEncodeError):  # surrogates that represent no byte
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return ascii(text)[1:-1]
    return ""


def existing(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def free_bytes(folder: Path) -> float:
    """Bytes that this process may still write there; infinite if the file system has no limit.
    Raises OSError."""
    found = os.statvfs(folder)
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else math.inf
