"""The command line that puts the zygote into bubblewrap."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agentenv.errors import ConfigError
from envs.sandbox.interpreter import Interpreter

HERE = Path(__file__).resolve().parent
_INSIDE = ("zygote.py", "cells.py", "confine.py", "landlock.py", "preload.py", "seccomp.py")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NAMESPACES_ADVICE = (
    "Unprivileged user namespaces must be allowed: sysctl kernel.unprivileged_userns_clone=1 "
    "(Debian), sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later), "
    "--security-opt seccomp=unconfined or --privileged (Docker)"
)


def bubblewrap(python: Interpreter) -> list[str]:
    """No network, a read-only system with nothing in it but /usr and the interpreter."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigError(
            "the Python sandbox needs bubblewrap, and there is no program bwrap: install it "
            "(apt install bubblewrap, dnf install bubblewrap, apk add bubblewrap)"
        )
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # to become another user, once inside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    made: set[Path] = set()
    for prefix in python.folders:
        for parent in reversed(Path(prefix).parents[:-1]):  # else only root may pass
            if parent not in made:
                command += ["--dir", str(parent)]
                made.add(parent)
        command += ["--ro-bind", prefix, prefix]
    command += ["--dir", "/sandbox"]
    for name in _INSIDE:
        command += ["--ro-bind", str(HERE / name), f"/sandbox/{name}"]
    command += ["--tmpfs", "/dev"]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    command += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", "/", "--setenv", "PYTHONHASHSEED", "0", "--"]
