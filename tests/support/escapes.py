"""Attacks on the host, on other sessions and on the sandbox itself: snippets that a sandbox must
stop, and their outcomes on a rung.

In a snippet {SECRET_FILE}, {SECRET_DIR} and {HOST_SOCKET} are filled in. One that prints PWNED got
through; so did one after which the host misses something, or the next call is not served.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agentenv.base.errors import AgentEnvError
from agentenv.base.untrusted import decode
from agentenv.envs.sandbox.launch import Rung
from agentenv.envs.sandbox.sandbox import RunResult, Sandbox

MARK = "PWNED"
SECRET = "the secret of the host"
NEXT_CALL = "print('next', 6 * 7)"
NEXT_CALL_TIMEOUT_S = 30.0
NUM_AT_ONCE = 2
FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = [FIXTURES / name for name in ("sandbox_attacks.json", "sandbox_attack_groups.json")]


class Outcome(NamedTuple):
    """The outcome of one snippet: "" or the breach, how its call ended, its output."""

    hole: str
    end: str
    output: str


class Places(NamedTuple):
    """The secrets and files of the host."""

    file: Path
    server: socket.socket

    def fill_in(self, snippet: str) -> str:
        names = {
            "{SECRET_FILE}": str(self.file),
            "{SECRET_DIR}": str(self.file.parent),
            "{HOST_SOCKET}": self.server.getsockname(),
        }
        for name, text in names.items():
            snippet = snippet.replace(name, text)
        return snippet

    def damage(self) -> str:
        """The damage to the host; "" if none."""
        if not self.file.exists() or self.file.read_text() != SECRET:
            return "the secret file was changed"
        if self.file.stat().st_mode & 0o777 != 0o644:
            return "the mode of the secret file was changed"
        if sorted(os.listdir(self.file.parent)) != ["secret", "socket"]:
            return "the secret folder was changed"
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return ""
        return "the host's socket was reached"


@contextmanager
def host_secrets() -> Iterator[Places]:
    """A secret file that anybody may read, a socket that anybody may use, an environment."""
    before = os.environ.get("SECRET_KEY")
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as server:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o644)
        server.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        server.listen()
        server.setblocking(False)
        os.environ["SECRET_KEY"] = SECRET
        with open(folder / "secret") as leaked:  # a descriptor that a careless start would pass on
            os.set_inheritable(leaked.fileno(), True)
            try:
                yield Places(folder / "secret", server)
            finally:
                if before is None:
                    del os.environ["SECRET_KEY"]
                else:
                    os.environ["SECRET_KEY"] = before


def printed(result: RunResult) -> str:
    """The output of a cell, without a traceback, which shows lines of the snippet that were not
    printed."""
    if result.problem.startswith("SystemExit"):
        return result.output
    return result.output.removesuffix(result.problem)


async def attack(sandbox: Sandbox, code: str, places: Places, timeout_s: float) -> Outcome:
    """Run one snippet in a separate session, then check the host and other sessions."""
    session = sandbox.session(1)
    try:
        result = await session.run(code, timeout_s)
        text = printed(result)
        served = False
        for _ in range(3):  # a snippet may break its own interpreter, which is then replaced
            following = await session.run(NEXT_CALL, NEXT_CALL_TIMEOUT_S)
            text += printed(following)
            served = "next 42" in following.output
            if served:
                break
        other = sandbox.session(2)
        try:
            neighbor = await other.run(NEXT_CALL, NEXT_CALL_TIMEOUT_S)
        finally:
            other.close()
    except AgentEnvError as error:
        return Outcome(f"the sandbox failed: {error}", "failed", "")
    except Exception as error:  # of the host: a snippet that causes it ends a run
        return Outcome(f"the host raised {type(error).__name__}: {error}", "failed", "")
    finally:
        session.close()
    hole = places.damage()
    if MARK in text or SECRET in text or SECRET in result.output:
        hole = f"it printed {MARK}" if MARK in text else "it printed the secret"
    elif not served or neighbor.output != "next 42":
        hole = "the next call was not served"
    return Outcome(hole, result.end, result.output)


async def attack_all(
    attacks: Mapping[str, str], rung: Rung, timeout_s: float
) -> dict[str, Outcome]:
    """Run all snippets on one rung. Raises ConfigError when this machine does not offer it."""
    sandbox = Sandbox(rungs=(rung,))
    free = asyncio.Semaphore(NUM_AT_ONCE)
    try:
        with host_secrets() as places:
            await sandbox.start()

            async def one(code: str) -> Outcome:
                async with free:
                    return await attack(sandbox, places.fill_in(code), places, timeout_s)

            outcomes = await asyncio.gather(*map(one, attacks.values()))
    finally:
        await sandbox.close()
    return dict(zip(attacks, outcomes, strict=True))


def known_attacks() -> dict[str, str]:
    """The snippets by name."""
    found: dict[str, str] = {}
    for path in FILES:
        found |= decode(path.read_bytes(), dict[str, str])
    return found
