"""From a page to its text, in worker processes that are killed when a page makes them hang."""

from __future__ import annotations

import asyncio
import struct
import sys
from contextlib import suppress
from pathlib import Path

from agentenv.errors import InfraError, ToolError
from envs.search.cassette import Reply

WORKER = Path(__file__).with_name("extract_worker.py")
START_TIMEOUT_S = 60.0  # importing trafilatura on a busy machine


class TextExtractor:
    """A pool of at most `num_workers` processes, started when needed.

    A page that takes over `timeout_s` is a ToolError, and its worker is replaced.
    """

    def __init__(self, num_workers: int = 2, timeout_s: float = 5.0, worker: Path = WORKER) -> None:
        self.timeout_s = timeout_s
        self.num_killed = 0
        self._worker = worker
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False

    async def extract(self, page: Reply) -> str:
        """The text of a fetched page; plain texts come back as they are, decoded."""
        async with self._slots:
            fresh = not self._idle
            process = await self._start() if fresh else self._idle.pop()
            healthy = False
            try:
                async with asyncio.timeout(START_TIMEOUT_S if fresh else None):
                    if fresh:  # its imports are no fault of the page
                        await _ask(process, "text/html", b"<p>warm</p>")
                async with asyncio.timeout(self.timeout_s):
                    found = await _ask(process, page.content_type, page.body)
                healthy = not self._closed
            except TimeoutError:
                self.num_killed += 1
                raise ToolError(f"{page.url} could not be read: its text takes too long.") from None
            except (OSError, asyncio.IncompleteReadError) as error:
                self.num_killed += 1
                raise ToolError(f"{page.url} could not be read.") from error
            finally:
                if healthy:
                    self._idle.append(process)
                else:
                    await _kill(process)
        return found

    async def close(self) -> None:
        """Kill the workers; idempotent."""
        self._closed = True
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(self._worker),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
                limit=1 << 20,
            )
        except OSError as error:
            raise InfraError(f"no process for text extraction: {error}") from error


async def _ask(process: asyncio.subprocess.Process, kind: str, body: bytes) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    content = kind.replace("\n", " ").encode() + b"\n" + body
    process.stdin.write(struct.pack(">I", len(content)) + content)
    await process.stdin.drain()
    (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
    return (await process.stdout.readexactly(length)).decode("utf-8", "replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill, and wait until the process is gone, also when cancelled meanwhile."""
    with suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    await asyncio.shield(process.wait())
