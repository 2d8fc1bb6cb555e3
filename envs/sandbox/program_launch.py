"""The specification of a program, and the command that starts it in its sandbox."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Struct

from agentenv.base.config import ESSENTIAL, PATH, about
from agentenv.base.errors import ConfigError, reported_as
from agentenv.envs.sandbox import confine
from agentenv.envs.sandbox.launch import HERE, Interpreter, namespaces, parents

MAX_OPEN_FILES = 4096
TMP_BYTES = 256 << 20  # of /tmp and of /dev/shm each
THREADS_A_PROCESS = 16  # counted against the processes of a user by the kernel
FOLDER, INSIDE = "/home/agent", "/sandbox"
INIT_FILES = ("program_init.py", "program_watch.py", "process_table.py", *confine.FILES)
SYSTEM_FILES = ("/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/ld.so.cache",
                "/etc/alternatives", "/etc/mime.types")  # fmt: skip
INSIDE_ETC = ("passwd", "group", "hosts", "nsswitch.conf")
SEED = "AGENTENV_SEED"
SITE = f"import os, random\nrandom.seed(int(os.environ['{SEED}']))\n"


class ProgramLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a program with all its processes. Reaching one ends the episode, with its name:
    wall, idle, calls, cpu, memory, processes, disk."""

    wall_s: Annotated[float, about("working time of the program, its calls not counted", gt=0)] = (
        600.0
    )
    idle_s: Annotated[
        float, about("time without a call or an exit, after which it counts as hung", gt=0)
    ] = 120.0
    max_calls: Annotated[int, about("calls of the policy", ge=1)] = 100
    cpu_s: Annotated[int, about("CPU seconds", ge=1)] = 300
    memory_bytes: Annotated[int, about("of all processes", ge=1 << 20)] = 2 << 30
    max_processes: Annotated[int, about("at a time", ge=1)] = 128
    disk_bytes: Annotated[int, about("of all files", ge=1 << 12)] = 512 << 20
    max_output_chars: ClassVar[int] = 8000  # of its output; head and tail are kept


class ProgramSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program and its sandbox."""

    command: Annotated[tuple[str, ...], about("program and arguments", ESSENTIAL, min_length=1)]
    folder: Annotated[str, about("initial files, copied into the program's own folder", PATH)] = ""
    files: Annotated[dict[str, str], about("additional initial files: texts by name")] = {}
    variables: Annotated[
        dict[str, str], about("environment variables in addition to those of the endpoint")
    ] = {}
    read_only: Annotated[
        tuple[str, ...], about("files and folders of the host that the program may read")
    ] = ()
    limits: Annotated[ProgramLimits, about("resource limits of one program")] = ProgramLimits()
    allow_unsafe: Annotated[bool, about("run it without a sandbox, with your own permissions")] = (
        False
    )


def bubblewrap(
    python: Interpreter, spec: ProgramSpec, folder: Path, forward: Path | None
) -> list[str]:
    """The command line that starts process 1 in the sandbox. Raises ConfigError."""
    command = namespaces(python)
    first = command.index("--ro-bind")  # mounts below /tmp come after
    command[first:first] = ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"]
    command += ["--as-pid-1", "--new-session"]
    for path in (*SYSTEM_FILES, *spec.read_only):
        if path in spec.read_only and not os.path.exists(path):
            raise ConfigError(f"read_only: no such path: {path}")
        command += [*parents(path), "--ro-bind-try", path, path]
    for name in INSIDE_ETC:
        command += ["--ro-bind", str(HERE / "program_etc" / name), f"/etc/{name}"]
    command += ["--dir", INSIDE, "--ro-bind", str(folder.with_name("site")), f"{INSIDE}/site"]
    for name in INIT_FILES:
        command += ["--ro-bind", str(HERE / name), f"{INSIDE}/{name}"]
    if forward is not None:
        command += ["--ro-bind", str(forward), f"{INSIDE}/endpoint"]
    shared = ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    command += ["--dev", "/dev", *shared]
    command += ["--proc", "/proc"]
    command += ["--dir", "/home", "--bind", str(folder), FOLDER]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]


def program_settings(
    spec: ProgramSpec, seed: int, uid: int | None, work: str, site: str
) -> dict[str, object]:
    """The settings for process 1, see program_init.py. `seed` makes hashes and random numbers of
    Python programs deterministic."""
    limits, confined = spec.limits, not spec.allow_unsafe
    own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": work, "LANG": "C.UTF-8", "TZ": "UTC"}
    own |= {"TMPDIR": "/tmp"} if confined else {}
    own |= {"PYTHONHASHSEED": str(seed % 2**32), SEED: str(seed), "PYTHONPATH": site}
    bin = str(Path(sys.executable).parent)
    if bin not in own["PATH"].split(os.pathsep):
        own["PATH"] = f"{bin}{os.pathsep}{own['PATH']}"
    rlimits = {"CORE": 0, "FSIZE": limits.disk_bytes, "CPU": limits.cpu_s + 1}
    rlimits |= {"NOFILE": MAX_OPEN_FILES} if confined else {}
    rlimits |= {"NPROC": limits.max_processes * THREADS_A_PROCESS} if confined else {}
    return {
        "command": spec.command,
        "confined": confined,
        "folder": work,
        "variables": {**own, **spec.variables},
        "uid": uid,
        "rlimits": rlimits,
        "limits": {
            "cpu": limits.cpu_s,
            "memory": limits.memory_bytes,
            "processes": limits.max_processes,
            "disk": limits.disk_bytes,
        },
        "watched": [work, "/tmp", "/dev/shm"] if confined else [work],
        "max_output_chars": limits.max_output_chars,
    }


def fill_folder(spec: ProgramSpec, uid: int | None, folder: Path) -> None:
    """Create the folder of a program with its initial files, and next to it the one of the module
    that seeds its Python programs. Raises ConfigError."""
    site = folder.with_name("site")
    site.mkdir(mode=0o755)
    (site / "sitecustomize.py").write_text(SITE)
    if spec.folder:
        with reported_as(ConfigError, f"folder: {spec.folder} cannot be copied", OSError):
            shutil.copytree(spec.folder, folder, symlinks=True)
    folder.mkdir(exist_ok=True)
    for name, text in spec.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"files: {name!r} leads out of the program's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if uid is not None:
        for place, _, names in os.walk(folder):
            for one in (place, *(os.path.join(place, name) for name in names)):
                os.chown(one, uid, uid, follow_symlinks=False)
