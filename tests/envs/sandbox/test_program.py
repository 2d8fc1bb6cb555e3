"""A program in its sandbox reaches one address, has named limits and leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.base.errors import ConfigError, InfraError
from agentenv.contract.env import close_shared
from agentenv.envs.sandbox.program import Ended, Program
from agentenv.envs.sandbox.program_launch import ProgramLimits, ProgramSpec
from tests.support.polling import until

SOCKETS: dict[int, Path] = {}  # by the port of a server
MARK = f"agentenvtestmark{os.getpid()}"  # in the command lines of the processes of a program


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    """The port of a server that returns the requested path, also at a Unix socket."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        path = asked.split()[1]
        head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(path)}\r\n\r\n"
        writer.write(head.encode() + path)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    SOCKETS[port] = tmp_path / "socket"
    local = await asyncio.start_unix_server(answer, SOCKETS[port])
    SOCKETS[port].chmod(0o666)
    yield port
    server.close()
    local.close()


@pytest.fixture(autouse=True)
async def _none_left() -> AsyncIterator[None]:
    yield
    await close_shared()
    assert left() == []


def python(code: str) -> tuple[str, ...]:
    return ("python3", "-c", textwrap.dedent(code), MARK)


async def run(spec: ProgramSpec, port: int = 0) -> tuple[Ended, Path]:
    """The end of a program, whose folder is then removed."""
    program = await Program.start(spec, 0, port, SOCKETS.get(port))
    try:
        async with asyncio.timeout(60):
            return await program.wait(), program.folder
    finally:
        await program.close()
        assert not program.folder.exists()


def left() -> list[str]:
    """Processes of programs that still run."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        line = one.info["cmdline"] or []
        if MARK in line:
            found.append(" ".join(line)[:80])
    return found


UNSAFE = pytest.mark.parametrize("unsafe", [False, True], ids=["sandbox", "unsafe"])


@UNSAFE
async def test_a_program_reaches_the_endpoint_and_its_files(port: int, unsafe: bool) -> None:
    code = f"""
    import os, urllib.request
    reply = urllib.request.urlopen("http://127.0.0.1:{port}/hello").read().decode()
    print(reply, open("data/a.txt").read(), os.environ["KEY"], os.listdir("."))
    """
    files = {"data/a.txt": "content"}
    spec = ProgramSpec(
        command=python(code), files=files, variables={"KEY": "value"}, allow_unsafe=unsafe
    )
    ended, _ = await run(spec, port)
    assert ended.output == "/hello content value ['data']\n"
    assert (ended.exit, ended.signal, ended.limit) == (0, None, "")


@UNSAFE
async def test_processes_left_by_a_program_are_killed(unsafe: bool) -> None:
    code = f"""
    import os, subprocess, sys, time
    inner = [sys.executable, "-c", "import time; time.sleep(600)", "{MARK}"]
    held = [subprocess.Popen(inner, start_new_session=True) for _ in range(3)]
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.3)
    print(sum(one.poll() is None for one in held))
    """
    ended, _ = await run(ProgramSpec(command=python(code), allow_unsafe=unsafe))
    assert (ended.exit, ended.output) == (0, "3\n"), ended
    assert left() == []


@UNSAFE
async def test_stopping_a_program_ends_all_its_processes(unsafe: bool) -> None:
    code = f"""
    import subprocess, sys
    inner = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
             "time.sleep(600)", "{MARK}"]
    subprocess.run(inner, start_new_session=True)
    """
    program = await Program.start(ProgramSpec(command=python(code), allow_unsafe=unsafe))
    await until(lambda: len(left()) >= 2)
    await program.stop()
    await program.stop()
    assert left() == []
    await program.close()
    assert not program.folder.exists()


BURN, WAIT = "while True: pass", "import time; time.sleep(60)"
DYING = "import sys\nfrom subprocess import run\n"
FORK = "import os\nos.fork(), os.fork()\n"
LINK = "for n in range(20000): os.symlink('x' * 200, f'f{n}')"
WRITE = "for n in range(99): open(f'f{n}', 'wb').write(bytes(1 << 20))"
LIMITS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": (BURN, {"cpu_s": 1}),
    "cpu of children": (f"import os\nos.fork() and os.wait()\n{BURN}", {"cpu_s": 1}),
    "cpu of dead children": (f"{DYING}while True: run([sys.executable, '-c', ''])", {"cpu_s": 1}),
    "memory": (f"x = bytearray(300 << 20)\n{WAIT}", {"memory_bytes": 1 << 27}),
    "memory of children": (f"{FORK}x = bytearray(80 << 20)\n{WAIT}", {"memory_bytes": 1 << 28}),
    "processes": (f"{FORK * 3}{WAIT}", {"max_processes": 20}),
    "disk": (f"{WRITE}\n{WAIT}", {"disk_bytes": 1 << 24}),
    "disk of links": (f"import os\n{LINK}\n{WAIT}", {"disk_bytes": 1 << 22}),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_named_limit_holds_for_all_processes_of_a_program_together(name: str) -> None:
    code, limits = LIMITS[name]
    spec = ProgramSpec(command=python(code), limits=ProgramLimits(**limits))
    ended, _ = await run(spec)
    assert ended.limit == name.partition(" ")[0], ended
    assert f"(program.limits.{next(iter(limits))})" in ended.text
    assert left() == []


async def test_a_flood_of_output_keeps_head_and_tail() -> None:
    code = "print('first'); [print('x' * 9999) for _ in range(9999)]; print('last')"
    ended, _ = await run(ProgramSpec(command=python(code)))
    assert ended.exit == 0
    assert ended.output.startswith("first\n")
    assert ended.output.endswith("last\n")
    assert " bytes ..." in ended.output
    assert len(ended.output) < 8100


async def test_a_missing_command_ends_with_an_error() -> None:
    ended, _ = await run(ProgramSpec(command=("no-such-program",)))
    assert ended.exit == 127
    assert "no-such-program" in ended.output


async def test_a_signal_ends_a_program() -> None:
    ended, _ = await run(ProgramSpec(command=("sh", "-c", "kill -SEGV $$")))
    assert ended.signal == signal.SIGSEGV
    assert ended.text == "was ended by signal 11"


async def test_files_are_read_only_within_the_folder_of_a_program(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = f"""
    import os
    open("good", "w").write("result" * 10)
    os.symlink("{secret}", "link")
    os.symlink("/", "root")
    os.mkfifo("fifo")
    os.mkdir("folder")
    """
    program = await Program.start(ProgramSpec(command=python(code)))
    await program.wait()
    assert program.read("good", 6) == "result"
    for name in ("link", f"root{secret}", "../errors", "fifo", "folder", "missing"):
        with pytest.raises(OSError):  # noqa: PT011 - any message of the system
            program.read(name, 100)
    await program.close()


async def test_read_only_files_below_tmp_are_readable_and_count_towards_no_limit(
    tmp_path: Path,
) -> None:
    (tmp_path / "big").write_bytes(bytes(1 << 22))
    os.chmod(tmp_path, 0o755)
    code = f"import os, time; time.sleep(1.5); print(os.path.getsize('{tmp_path}/big'))"
    limits = ProgramLimits(disk_bytes=1 << 20)
    spec = ProgramSpec(command=python(code), read_only=(str(tmp_path),), limits=limits)
    ended, _ = await run(spec)
    assert (ended.exit, ended.output) == (0, f"{1 << 22}\n")
    with pytest.raises(ConfigError, match=r"read_only.*/no/such"):
        await Program.start(ProgramSpec(command=("true",), read_only=("/no/such",)))


async def test_initial_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("one")
    spec = ProgramSpec(command=("sh", "-c", "cat sub/a; echo two > sub/a"), folder=str(tmp_path))
    for _ in range(2):
        ended, _ = await run(spec)
        assert ended.output == "one"
    with pytest.raises(ConfigError, match="/no/such"):
        await Program.start(ProgramSpec(command=("true",), folder="/no/such"))
    with pytest.raises(ConfigError, match="leads out"):
        await Program.start(ProgramSpec(command=("true",), files={"../x": ""}))


async def test_a_machine_without_namespaces_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="allow_unsafe = true"):
        await Program.start(ProgramSpec(command=("true",)))


async def test_a_killed_sandbox_is_an_infra_error() -> None:
    program = await Program.start(ProgramSpec(command=python("import time; time.sleep(600)")))
    waiting = asyncio.ensure_future(program.wait())
    await until(lambda: len(left()) >= 1)
    os.killpg(program._process.process.pid, signal.SIGKILL)
    with pytest.raises(InfraError, match="SIGKILL"):
        await waiting
    await program.close()
    assert left() == []


@UNSAFE
def test_programs_end_with_their_killed_host(unsafe: bool, tmp_path: Path) -> None:
    code = f"""
    import asyncio, sys
    from agentenv.envs.sandbox.program import Program
    from agentenv.envs.sandbox.program_launch import ProgramSpec

    async def main():
        inner = ("python3", "-c", "import time; time.sleep(600)", "{MARK}")
        for _ in range(3):
            program = await Program.start(ProgramSpec(command=inner, allow_unsafe={unsafe}))
            asyncio.ensure_future(program.wait())
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=env
    )
    assert host.stdout is not None
    assert host.stdout.readline() == b"ready\n"
    while len(left()) < 3:
        time.sleep(0.05)
    host.kill()
    host.wait(10)
    until = time.monotonic() + 20
    while left() and time.monotonic() < until:
        time.sleep(0.1)
    assert left() == []
    host.stdout.close()


# Escapes: each prints its success, and nothing if it is stopped.

ESCAPES = {
    "a port of the host": "socket.create_connection(('127.0.0.1', {port}), 2); print('through')",
    "an address of the host": "socket.create_connection(('{address}', {port}), 2); print('in')",
    "the internet": "socket.create_connection(('1.1.1.1', 53), 2); print('through')",
    "an abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print('in')",
    "a virtual machine's host": "socket.socket(socket.AF_VSOCK); print('vsock')",
    "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('raw')",
    "a file of the host": "print(open('{secret}').read())",
    "the host's root": "print(open('/proc/1/root{secret}').read())",
    "process 1": "print(open('/proc/1/environ').read(), os.listdir('/proc/1/fd'))",
    "process 1 by memory": "open('/proc/1/mem', 'rb+'); print('memory')",
    "process 1 by tracing": "c = ctypes.CDLL(None).ptrace(16, 1, 0, 0); print('' if c else 'in')",
    "a namespace of its own": "c = ctypes.CDLL(None).unshare(0x10000000); print('' if c else 'in')",
    "a mount": "c = ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0); print('' if c else 1)",
    "the system's files": "open('/usr/x', 'w'); print('written')",
    "the interpreter's files": "open(os.path.join(sys.prefix, 'x'), 'w'); print('written')",
    "its sandbox's files": "open('/sandbox/program_init.py', 'a'); print('written')",
    "the user root": "os.setuid(0); print('root')",
    "processes of the host": "print(*[p for p in os.listdir('/proc') if p.isdigit()][9:])",
    "a process of the host": "os.kill({pid}, 0); print('there')",
    "the kernel's keys": "c = ctypes.CDLL(None).syscall(248, b'user', b'x', b'y', 1, -3); "
    "print('' if c < 0 else 'key')",
    "devices": "print(*set(os.listdir('/dev')) & {{'sda', 'vda', 'mem', 'kvm', 'fuse'}})",
    # the interpreter of the run may lie below /tmp
    "other programs' folders": "print(*[n for n in os.listdir('/tmp') if 'agentenv-' in n])",
    "variables of the host": "print(os.environ.get('SECRET', ''))",
}


async def test_no_escape_succeeds(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    name = f"agentenv-test-{os.getpid()}"
    known = [one for ones in psutil.net_if_addrs().values() for one in ones]
    addresses = [one.address for one in known if one.family == socket.AF_INET]
    address = next((one for one in addresses if not one.startswith("127.")), "10.0.0.1")
    with socket.create_server(("", 0)) as other, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        places = {"port": other.getsockname()[1], "address": address, "name": name,
                  "secret": secret, "pid": os.getpid()}  # fmt: skip
        code = ["import ctypes, os, socket, sys"]
        for escape, attempt in ESCAPES.items():
            attempt = attempt.format(**places)
            code.append(f"try:\n    print({escape!r}, end=': '); {attempt}\n    print()")
            code.append("except Exception as error:\n    print()")
        ended, _ = await run(ProgramSpec(command=("python3", "-c", "\n".join(code))), port)
    assert ended.exit == 0, ended
    lines = dict(line.split(": ", 1) for line in ended.output.splitlines() if ": " in line)
    assert lines.keys() == ESCAPES.keys()
    assert {escape: got for escape, got in lines.items() if got.strip()} == {}
