"""Runs inside the sandbox, as its process 1; needs nothing but the standard library.

    rung             "namespaces": inside bubblewrap, a session has namespaces of its own.
                     "landlock": a session may read the system and write nowhere.
                     "unsafe": limits only.
    control socket   one JSON packet a request: {"spawn": n, "seed": s} with the session's socket
                     attached, or {"kill": n}. At its end of file everything in here dies.
    session          a fork that sees no other session, bound by a filter of system calls. It reads
                     length-prefixed JSON {"code"} and answers {"output", "problem"}.

What a session answers comes from a process that runs untrusted code: the host believes nothing.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import gc
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.sandbox import cells, confine, preload, seccomp
else:  # inside, these files are all there is
    import cells
    import confine
    import preload
    import seccomp

REAP_INTERVAL_S = 0.1
CHANNEL_FD = 3  # of a session, beside the standard three


def main() -> None:
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control_fd"])
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    confine.die_with_parent()
    null = os.open(os.devnull, os.O_RDWR)
    del sys.path[0]
    missing = preload.preload(config["preload"], config["preload_if_installed"])
    home = "/"
    if config["rung"] == "namespaces":
        home = "/tmp"
    elif config["rung"] == "landlock":
        config["rules_fd"] = confine.landlock_ruleset(confine.landlock_abi(), config["readable"])
    else:
        home = tempfile.mkdtemp(prefix="agentenv-")
    with open("/proc/self/statm") as file:  # the limit is what a session may add
        config["rlimits"]["AS"] += int(file.read().split()[0]) * resource.getpagesize()
    for fd in range(3):  # last, so that the host can read about a failure until here
        os.dup2(null, fd)
    control.send(json.dumps({"missing": missing}).encode())
    gc.collect()
    gc.freeze()
    _serve(control, config, home)


def _serve(control: socket.socket, config: dict[str, Any], home: str) -> None:
    pids: dict[int, int] = {}
    while True:
        if select.select([control], [], [], REAP_INTERVAL_S if pids else None)[0]:
            packet, channel = _receive_packet(control)
            if not packet:
                break
            request = json.loads(packet)
            if "spawn" in request:
                pids[request["spawn"]] = _spawn(channel, request["seed"], config, home)
                os.close(channel)
            elif pids.get(request["kill"]):
                os.kill(pids[request["kill"]], signal.SIGKILL)
        _reap(pids)
    if config["rung"] != "namespaces":  # there the end of process 1 is the end of all
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
    if config["rung"] == "unsafe":
        shutil.rmtree(home, ignore_errors=True)


def _receive_packet(control: socket.socket) -> tuple[bytes, int]:
    fds = array.array("i")
    packet, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(fds.itemsize))
    for _, _, data in ancillary:
        fds.frombytes(data)
    return packet, fds[0] if fds else -1


def _reap(pids: dict[int, int]) -> None:
    numbers = {pid: number for number, pid in pids.items()}
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        pids.pop(numbers.get(pid, -1), None)


def _spawn(channel: int, seed: int, config: dict[str, Any], home: str) -> int:
    """Fork a session; its pid, or 0 when it could not be made (the host reads why)."""
    ids = os.getuid(), os.getgid()  # inside they are unknown, until mapped
    isolated = config["rung"] == "namespaces"
    try:
        pid = confine.fork_into_namespaces() if isolated else os.fork()
    except OSError as error:
        with contextlib.suppress(OSError):  # the host may have turned away meanwhile
            cells.send(channel, {"error": str(error)})
        return 0
    if pid == 0:
        try:
            if isolated:
                confine.map_ids(*ids)
            _run_session(channel, seed, config, home)
        finally:
            os._exit(1)  # whatever happened, never go on as a second zygote
    return pid


def _run_session(channel: int, seed: int, config: dict[str, Any], home: str) -> None:
    """Confine this process, then serve its cells until the host is gone."""
    os.dup2(channel, CHANNEL_FD)
    try:
        preload.reseed(seed)
        _confine(config, home)
    except (OSError, ValueError) as error:
        cells.send(CHANNEL_FD, {"error": str(error)})
        return
    sys.argv = [""]
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    cells.send(CHANNEL_FD, {"ready": True})
    cells.serve(CHANNEL_FD, main_module.__dict__, config["max_output_chars"])


def _confine(config: dict[str, Any], home: str) -> None:
    """Give up all that a session must not have, every descriptor but CHANNEL_FD too."""
    rung = config["rung"]
    if rung == "namespaces":
        confine.cover(config["tmp_bytes"], config["below_tmp"])
    else:
        os.setsid()
        confine.die_with_parent()
    if rung == "unsafe":
        home = tempfile.mkdtemp(dir=home)
    os.chdir(home)
    os.environ["HOME"] = home
    confine.limit(config["rlimits"])
    confine.drop_privileges()
    if rung == "landlock":
        confine.restrict_self_by(config["rules_fd"])
        preload.import_without_stat()
    os.closerange(CHANNEL_FD + 1, 1 << 20)
    if rung != "unsafe":
        seccomp.install(
            seccomp.program(
                platform.machine(),
                os.getpid(),
                files=rung == "namespaces",
                threads=config["rlimits"]["NPROC"] > 1,
            )
        )


if __name__ == "__main__":
    main()
