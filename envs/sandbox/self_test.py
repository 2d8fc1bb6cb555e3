"""Quick escapes that are tried on every sandbox before any untrusted code runs in it."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import tomllib
from pathlib import Path

from agentenv.envs.sandbox.channel import ChannelClosedError
from agentenv.envs.sandbox.preload import ONE_THREAD
from agentenv.envs.sandbox.process import ZygoteProcess
from agentenv.errors import InfraError

TIMEOUT_S = 10.0

_PROBES: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


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
                for escape, probe in _PROBES.items():
                    answer = await session.ask({"code": probe.format(**places)})
                    said = f"{answer.output}{answer.problem}".strip()
                    if said:
                        return f"it could {escape}: {said[:200]}"
        except (ChannelClosedError, TimeoutError) as error:
            raise InfraError(f"the sandbox did not survive its self-test: {error}") from error
        finally:
            session.kill()
    return ""
