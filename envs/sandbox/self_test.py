"""Quick escapes that are tried on every sandbox before any untrusted code runs in it."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path

from agentenv.errors import InfraError
from envs.sandbox.channel import ChannelClosedError
from envs.sandbox.zygote_process import ZygoteProcess

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
        own = {{"HOME", "PWD", "LC_CTYPE", "PYTHONHASHSEED"}}
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
        print(*[name for name in os.listdir("/proc") if name.isdigit()])
        if os.getpid() != 1 or os.getppid() != 0:
            print(os.getpid(), os.getppid())
    """,
    "write outside its /tmp": """
        import os
        for folder in ("/", "/usr", "/usr/local", "/dev", "/dev/shm", "/proc", {here!r}):
            if folder == "/tmp":
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
        }
        number, channel = await zygote.spawn(0)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for what, probe in _PROBES.items():
                    await channel.send({"code": _dedent(probe).format(**places)})
                    answer = await channel.receive()
                    if not answer.ok or answer.output.strip():
                        return f"it could {what}: {answer.output[:200]}"
        except (ChannelClosedError, TimeoutError) as error:
            raise InfraError(f"the sandbox did not survive its self-test: {error}") from error
        finally:
            zygote.kill(number, channel)
    return ""


def _dedent(text: str) -> str:
    return "\n".join(line[8:] for line in text.splitlines())
