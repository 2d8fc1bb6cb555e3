"""Quick escapes that are tried on every sandbox before any untrusted code runs in it."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path

from agentenv.envs.sandbox.channel import ChannelClosedError
from agentenv.envs.sandbox.preload import ONE_THREAD
from agentenv.envs.sandbox.process import ZygoteProcess
from agentenv.errors import InfraError

TIMEOUT_S = 10.0

# Each prints what it got through to, or nothing. What is in braces is filled in.
_PROBES = {
    "read a file of the host": """
        for path in ({secret!r}, "/etc/shadow", "/etc/passwd"):
            try:
                print(path, len(open(path, "rb").read()))
            except OSError:
                pass
    """,
    "read the environment of the host": """
        import os
        own = {{"HOME", "PWD", "LC_CTYPE", "PYTHONHASHSEED", "MPLCONFIGDIR", *{own!r}}}
        print(*sorted(os.environ.keys() - own))
        for pid in ("self", "1"):
            try:
                print(open(f"/proc/{{pid}}/environ").read())
            except OSError:
                pass
    """,
    "connect to the host": """
        import socket
        for address in (("127.0.0.1", {port}), {name!r}):
            try:
                connection = socket.socket(
                    socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                )
                connection.settimeout(1)
                connection.connect(address)
                print(address)
            except OSError:
                pass
    """,
    "see processes of the host": """
        import os
        try:
            print(*[name for name in os.listdir("/proc") if name.isdigit()])
        except OSError:
            pass
        for name in ("environ", "cmdline", "maps", "mem"):
            for pid in {{"self", "1", os.getppid(), {pid}}}:
                try:
                    open(f"/proc/{{pid}}/{{name}}", "rb").read(1)
                    print(pid, name)
                except OSError:
                    pass
    """,
    "signal processes of the host": """
        import os
        for pid in {{1, os.getppid(), {pid}, -1}} - {{os.getpid()}}:
            try:
                os.kill(pid, 0)
                print(pid)
            except OSError:
                pass
    """,
    "start a process": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for attempt in (os.fork, lambda: os.posix_spawn("/bin/true", ["true"], {{}}), libc.vfork):
            try:
                if attempt() >= 0:
                    print("forked")
                    os._exit(0)
            except OSError:
                pass
        try:
            os.execv("/bin/true", ["true"])
        except OSError:
            pass
    """,
    "write outside its /tmp": """
        import os
        for folder in ("/", "/usr", "/usr/local", "/dev", "/dev/shm", "/proc", {here!r}):
            if folder == "/tmp" == os.environ["HOME"]:
                continue
            try:
                with open(os.path.join(folder, "probe"), "w"):
                    print(folder)
            except OSError:
                pass
    """,
    "regain privileges": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for attempt in (lambda: libc.umount2(b"/proc", 2), lambda: libc.sethostname(b"x", 1)):
            if attempt() == 0:
                print("a capability is left")
    """,
}


async def find_escape(zygote: ZygoteProcess) -> str:
    """The first escape that gets through, in words; "" when none does."""
    name = f"\0agentenv-{os.getpid()}-{id(zygote)}"
    with (
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        secret.write(b"secret")
        secret.flush()
        unix.bind(name)
        unix.listen()
        places = {
            "secret": secret.name,
            "port": tcp.getsockname()[1],
            "name": name,
            "here": str(Path(secret.name).parent),
            "pid": os.getpid(),
            "own": ONE_THREAD,
        }
        session = await zygote.spawn(0)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for what, probe in _PROBES.items():
                    answer = await session.ask({"code": _dedent(probe).format(**places)})
                    said = f"{answer.output}{answer.problem}".strip()
                    if said:
                        return f"it could {what}: {said[:200]}"
        except (ChannelClosedError, TimeoutError) as error:
            raise InfraError(f"the sandbox did not survive its self-test: {error}") from error
        finally:
            session.kill()
    return ""


def _dedent(text: str) -> str:
    return "\n".join(line[8:] for line in text.splitlines())
