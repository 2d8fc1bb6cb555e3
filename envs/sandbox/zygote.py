"""Runs inside the sandbox, as its process 1; needs nothing but the standard library.

    rung             "namespaces": inside bubblewrap, a session has its own namespaces.
                     "landlock": a session may read the system and write nowhere.
                     "unsafe": limits only.
    control socket   its number is the argument; first the settings (`settings_of` in launch.py),
                     answered by a report with a descriptor of this process. Then one JSON packet a
                     request: {"spawn": n, "seed": s} with the session's socket
                     attached; its answer {"born": n} has a descriptor of the new process, by
                     which the host stops and kills it. Or {"fork": n, "child": m} with the socket
                     of m, answered like a spawn, by {"failed": m} if it failed, and
                     {"forget": m}. At the end of file all processes end.
    session          a fork that sees no other session, bound by a filter of system calls. It reads
                     length-prefixed JSON {"number", "code"} and answers {"number", "output",
                     "problem"}, {"number", "digest": ""} and answers {"number", "digest"}, or
                     {"number", "fork": ""} and answers {"number", "forked"}; see fork_broker.py.

A session runs untrusted code: the host trusts none of its answers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import importlib.util
import json
import os
import platform
import resource
import select
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import cells, confine
    from agentenv.envs.sandbox import process_table as table
    from agentenv.envs.sandbox.fork_broker import Announce, ForkBroker, ForkInitializer
else:  # inside the sandbox, only these files exist
    import cells
    import confine
    import process_table as table
    from fork_broker import Announce, ForkBroker, ForkInitializer


MAX_SETTINGS_BYTES = 1 << 18
REAP_INTERVAL_S = 0.1
WEIGH_SHARE = 20  # one part of the time measures the memory of sessions
NICENESS = 5
CHANNEL_FD = 3  # of a session, after the standard three


def main() -> None:
    """Drop rights, load the modules of sessions, and serve until the host is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(control.recv(MAX_SETTINGS_BYTES))
    os.environ.pop("GLIBC_TUNABLES", None)  # the C library has read it
    os.nice(NICENESS)  # the trainer comes first
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # killed last when memory runs out
    confine.become(config["uid"])
    confine.die_with_parent()
    confine.no_new_privileges()
    confine.be_seen(True)
    null = os.open(os.devnull, os.O_RDWR)
    initializer = None
    if config["rung"] == "namespaces":
        initializer = ForkInitializer(config["tmp_bytes"], config["below_tmp"])
    del sys.path[0]
    missing = preload(config["preload"], config["preload_is_optional"])
    config["scope"], problem = cells.prelude(config["prelude"], config["max_output_chars"])
    if config["rung"] == "landlock":
        config["rules_fd"] = confine.landlock_ruleset(confine.landlock_abi(), config["readable"])
    config["rlimits"]["AS"] += _pages("self", 0) * resource.getpagesize()
    for fd in range(3):  # last, so that the host can read about a failure until here
        os.dup2(null, fd)
    gc.collect()
    pids: dict[int, int] = {}
    broker = None
    if config["rung"] != "unsafe":
        broker = _broker(config, initializer, pids, functools.partial(_announce, control))
    if config["rung"] == "namespaces" or broker is not None:  # its own process 1, or brokered
        config["filter"] = _filter(config, 1)
    own = os.pidfd_open(os.getpid())
    report = {"missing": missing, "problem": problem, "live_forks": broker is not None}
    socket.send_fds(control, [json.dumps(report).encode()], [own])
    os.close(own)
    gc.freeze()
    confine.use_huge_pages()
    _serve(control, config, pids, broker)


def _filter(config: dict[str, Any], pid: int) -> bytes:
    """The system-call filter of a session whose process has `pid` in its namespace; cached if it is
    the same for all."""
    if "filter" in config:
        return bytes(config["filter"])
    code = confine.program(
        platform.machine(),
        pid,
        files=config["rung"] == "namespaces",
        fork_flags=config.get("fork_flags", 0),
    )
    return confine.assembled(code)


def _broker(
    config: dict[str, Any],
    initializer: ForkInitializer | None,
    pids: dict[int, int],
    announce: Announce,
) -> ForkBroker | None:
    """The broker of forks; None if the kernel or an outer filter does not support it."""
    isolated = config["rung"] == "namespaces"
    flags = confine.FORK_INTO_NAMESPACES if isolated else confine.FORK_BESIDE
    machine = platform.machine()
    try:
        above = confine.assembled(confine.listening(machine, flags))
        listener = confine.install(machine, above, listen=True)
    except (OSError, ValueError):
        return None
    config["fork_flags"] = flags
    config["rlimits"]["NPROC"] = -1  # the broker counts
    return ForkBroker(listener, CHANNEL_FD, initializer, pids, announce)


def _serve(
    control: socket.socket, config: dict[str, Any], pids: dict[int, int], broker: ForkBroker | None
) -> None:
    """Answer requests and reap ended processes until the host is gone."""
    max_pages = config["max_total_bytes"] // resource.getpagesize()
    weigh_at = 0.0
    waiting: list[Any] = [control, *([broker.listener] if broker else [])]
    while True:
        ready = select.select(waiting, [], [], REAP_INTERVAL_S if pids else None)[0]
        if control in ready:
            packet, fds, *_ = socket.recv_fds(control, 4096, 1)
            if not packet:
                break
            request = json.loads(packet)
            if "spawn" in request:
                pid = _spawn(fds[0], request["seed"], config)
                os.close(fds[0])
                if pid:
                    pids[request["spawn"]] = pid
                    if broker is not None and config["rung"] != "namespaces":
                        broker.begins(pid)
                    _announce(control, request["spawn"], pid)
            elif broker is not None and "fork" in request:
                broker.grant(request["fork"], request["child"], fds[0])
            elif broker is not None:
                broker.forget(request["forget"])
        elif broker is not None and ready:
            broker.answer_next()
        if broker is not None:
            broker.expire()
        _reap(pids, broker)
        now = time.monotonic()
        if pids and now >= weigh_at:
            _kill_the_largest(pids.values(), max_pages)
            weigh_at = now + max(REAP_INTERVAL_S, WEIGH_SHARE * (time.monotonic() - now))
    if config["rung"] != "namespaces":  # there the end of process 1 is the end of all
        for pid in pids.values():
            table.end(pid)


def _announce(control: socket.socket, number: int, pid: int) -> None:
    """Report a session's process to the host, or that it failed."""
    fds = [os.pidfd_open(pid)] if pid else []
    news = {"born" if pid else "failed": number}
    try:
        socket.send_fds(control, [json.dumps(news).encode()], fds)
    except OSError:  # the host is gone; the next read of the socket shows it
        pass
    finally:
        for fd in fds:
            os.close(fd)


def _kill_the_largest(pids: Iterable[int], max_pages: int) -> None:
    """End the largest session if all together exceed their memory limit."""
    common = _pages("self", 1) - _pages("self", 2)
    weights = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            weights[pid] = _pages(pid, 1) - _pages(pid, 2) - common
    if sum(weight for weight in weights.values() if weight > 0) > max_pages:
        table.end(max(weights, key=weights.__getitem__))


def _pages(pid: int | str, field: int) -> int:
    """Of a process: 0 its address space, 1 resident, 2 of these shared with files."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[field])


def _reap(pids: dict[int, int], broker: ForkBroker | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            for number in [number for number, one in pids.items() if one == pid]:
                del pids[number]
            if broker is not None:
                broker.ended(pid)


def _spawn(channel: int, seed: int, config: dict[str, Any]) -> int:
    """Fork a session; returns its pid, or 0 on failure, which the host reads."""
    ids = os.getuid(), os.getgid()  # inside they are unknown, until mapped
    isolated = config["rung"] == "namespaces"
    try:
        if isolated:
            pid = confine.fork_into_namespaces(first="fork_flags" not in config)
        else:
            pid = os.fork()
    except OSError as error:
        with contextlib.suppress(OSError):  # the host may have turned away meanwhile
            cells.send(channel, {"error": str(error)})
        return 0
    if pid == 0:
        try:
            if isolated:
                confine.map_ids(*ids)
            _run_session(channel, seed, config)
        finally:
            os._exit(1)  # never continue as a second zygote
    return pid


def _run_session(channel: int, seed: int, config: dict[str, Any]) -> None:
    """Confine this process, then serve its cells until the host is gone."""
    os.dup2(channel, CHANNEL_FD)
    try:
        cells.seed_all(seed)
        home = _confine(config)
    except (OSError, ValueError) as error:
        cells.send(CHANNEL_FD, {"error": str(error)})
        return
    sys.argv = [""]
    sys.modules["__main__"] = config["scope"]
    cells.send(CHANNEL_FD, {"ready": True})
    files = None if config["rung"] == "landlock" else home  # no file can be written there
    fork = functools.partial(confine.fork_at_rest, config.get("fork_flags", 0))
    cells.serve(CHANNEL_FD, vars(config["scope"]), config["max_output_chars"], files, fork)


def _confine(config: dict[str, Any]) -> str:
    """Drop all rights that a session must not have, and all descriptors except CHANNEL_FD; returns
    its working folder."""
    rung, home = config["rung"], str(config["home"])
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
    confine.drop_privileges(seen="fork_flags" in config)
    if rung == "landlock":
        confine.restrict_self_by(config["rules_fd"])
        stat_by_opening()
    os.closerange(CHANNEL_FD + 1, 1 << 20)
    if rung != "unsafe":
        confine.install(platform.machine(), _filter(config, os.getpid()))
    return home


# Modules that every session finds imported and warmed up.

# likely imports of code that calculates
STANDARD = (
    "bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions "
    "functools heapq itertools math operator re statistics string textwrap typing"
)


def preload(names: Sequence[str], optional: bool) -> list[str]:
    """Import modules and trigger their lazy setup; returns the names that cannot be imported.

    If they are `optional`, the ones that are not installed are left out without a word.
    """
    for name in STANDARD.split():
        importlib.import_module(name)
    missing = []
    warnings.filterwarnings("ignore", "tqdm:disabling monitor")  # a thread that no session has
    os.environ.update(dict.fromkeys(confine.ONE_THREAD, "1"))
    for name in names:
        if optional and importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
        else:
            _WARM_UPS.get(name, int)()
    return missing


def stat_by_opening() -> None:
    """Let Python open files instead of querying their path, which the sandbox forbids.

    Links are always followed. A path that cannot be opened counts as missing, an existing one as
    accessible: a write fails later.
    """
    machinery: Any = importlib.import_module("importlib._bootstrap_external")
    machinery._path_stat = os.stat = os.lstat = _stat_by_opening
    os.access = _access_by_opening
    os.environ["MPLCONFIGDIR"] = sys.prefix  # matplotlib requires an existing folder


def _stat_by_opening(path: Any, *, dir_fd: int | None = None, **_: Any) -> os.stat_result:
    if isinstance(path, int):
        return os.fstat(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except PermissionError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _access_by_opening(path: Any, mode: int, *, dir_fd: int | None = None, **_: Any) -> bool:
    try:
        _stat_by_opening(path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


def _warm_numpy() -> None:
    import numpy as np

    np.random.seed(0)
    square = np.random.rand(3, 3) + np.eye(3)
    np.linalg.solve(square, np.ones(3))
    np.linalg.eigh(square + square.T)
    np.linalg.svd(square)
    str(np.random.default_rng(0).normal(size=3))
    repr(np.arange(3).reshape(1, 3).cumsum() / 2)


def _warm_sympy() -> None:
    sympy: Any = importlib.import_module("sympy")

    x, y = sympy.symbols("x y")
    repr(sympy.solve(x**2 - 3 * x + 2, x))
    repr(sympy.solve([x + y - 3, x - y - 1], [x, y]))
    repr(sympy.integrate(sympy.sin(x) * x, (x, 0, sympy.pi)))
    repr(sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2))
    repr(sympy.factor(sympy.expand((x + 1) ** 3)))
    repr(sympy.diff(sympy.exp(x) / x, x))
    repr(sympy.limit(sympy.sin(x) / x, x, 0))
    repr(sympy.factorint(360)), repr(sympy.sqrt(8)), repr(sympy.Rational(1, 3).evalf(20))
    repr(sympy.Matrix([[1, 2], [3, 4]]).inv())
    repr(sympy.sympify("2*x + 1"))


_WARM_UPS: dict[str, Callable[[], None]] = {"numpy": _warm_numpy, "sympy": _warm_sympy}


if __name__ == "__main__":
    main()
