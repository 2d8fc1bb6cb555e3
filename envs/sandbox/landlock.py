"""Part of the zygote: Landlock, by which an unprivileged process gives up the file system."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446  # on every architecture
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR = 4, 8
NET_BIND_AND_CONNECT = 3
SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 3

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The version of Landlock that this kernel offers; 0 when there is none."""
    version = _libc.syscall(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)
    return max(int(version), 0)


def ruleset(version: int, readable: Iterable[str]) -> int:
    """A descriptor of rules: nothing but reading below `readable`. Raises OSError.

    What an older version cannot forbid (cutting files, signals, sockets, devices) the filter of
    system calls forbids anyway; the newer versions forbid it a second time.
    """
    handled = attributes(version)
    fd = int(_libc.syscall(SYS_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    _check(fd, "Landlock rules")
    for path in readable:
        rights = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, place)
        _check(_libc.syscall(SYS_ADD_RULE, fd, RULE_PATH_BENEATH, rule, 0), f"rule for {path}")
        os.close(place)
    return fd


def restrict_self(fd: int) -> None:
    """Bind this process to the rules for good. Needs no-new-privileges. Raises OSError."""
    _check(_libc.syscall(SYS_RESTRICT_SELF, fd, 0), "Landlock")


def attributes(version: int) -> bytes:
    """All that this version can forbid: struct landlock_ruleset_attr, as long as it knows it."""
    num_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    fields = [(1 << num_rights) - 1]
    if version >= 4:
        fields.append(NET_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
    return struct.pack(f"={len(fields)}Q", *fields)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
