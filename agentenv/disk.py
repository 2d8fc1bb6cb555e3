"""Files and folders that are whole whenever somebody reads them, also after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

PARTIAL, OLD = ".partial", ".old"


def write_whole(path: Path, data: str | bytes | Iterable[bytes], *, durable: bool = False) -> None:
    """Write a file beside its name and rename it, so that no reader ever sees half of the file.

    Text is written as UTF-8. A `durable` file is on the disk before it has its name, and so
    survives a crash of the machine. Raises OSError.
    """
    if isinstance(data, str):
        data = data.encode()
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)


def replace_folder(partial: Path, folder: Path) -> None:
    """Give the complete folder `partial` the name `folder`, in place of an older one, durably.

    A crash between the two renames leaves the older one as FOLDER.old, which `finished_folder`
    finds. Raises OSError.
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
    """The folder, or the one put aside for it if a crash cut `replace_folder` in two."""
    old = folder.with_name(folder.name + OLD)
    return old if old.is_dir() and not folder.exists() else folder


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
