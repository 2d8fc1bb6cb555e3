"""Killable workers: jobs that may hang, or crash, run in processes with a limit from outside.

A job over its limit is killed by SIGKILL, whatever it does; its successor is a fork of a warm
process and costs milliseconds. Jobs run beside each other up to `max_jobs`, and a limit starts
when its job does. With `max_wait_s` a job that finds no place is refused, not kept waiting, and
one that has been at work for GIVE_WAY_AFTER_S gives way to one that waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

from agentenv.errors import ConfigError, GraderError
from envs.grading.zygote import MAX_FRAME_BYTES

# The host's end of the socket to the process behind a WorkerPool.


class WorkerLink:
    """One zygote process and the socket to it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, inner = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with inner:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envs.grading.zygote"],
                stdin=inner.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": path},
            )
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        self._input = bytearray()
        self._output = bytearray()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.first: asyncio.Future[Any] = self._loop.create_future()
        self.closed = False

    def expect(self, number: int) -> asyncio.Future[Any]:
        """The answer to come for a job."""
        self._waiting[number] = self._loop.create_future()
        return self._waiting[number]

    def forget(self, number: int) -> None:
        """Give a job up and have its worker killed."""
        self._waiting.pop(number, None)
        self.send({"kill": number})

    def send(self, message: Any) -> None:
        """Send a frame, in the background. Raises GraderError for one that is too long."""
        data = json.dumps(message).encode("utf-8", "backslashreplace")
        if self.closed:
            return
        if len(data) > MAX_FRAME_BYTES:
            raise GraderError(f"a job of {len(data)} bytes; at most {MAX_FRAME_BYTES} can be sent")
        self._output += struct.pack("!I", len(data)) + data
        self._writable()

    def close(self) -> None:
        """Kill the process; whoever waits learns that it died."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # reaps, never blocks
        for future in [self.first, *self._waiting.values()]:
            if not future.done():
                future.set_result({})
        self._waiting.clear()

    def _writable(self) -> None:
        try:
            del self._output[: self._socket.send(self._output)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._output:
            self._loop.add_writer(self._socket, self._writable)
        else:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._input += data
        while len(self._input) >= 4:
            (size,) = struct.unpack_from("!I", self._input)
            if len(self._input) < 4 + size:
                return
            answer = json.loads(bytes(self._input[4 : 4 + size]))
            del self._input[: 4 + size]
            future = self._waiting.pop(answer["id"], None) if "id" in answer else self.first
            if future is not None and not future.done():
                future.set_result(answer)


START_TIMEOUT_S = 60.0
GIVE_WAY_AFTER_S = 0.3
CHECK_EVERY_S = 0.05  # how often a job looks whether others wait
KILL_TIMEOUT_S = 0.1  # how long to wait for what is said of a killed job


class JobTimeoutError(Exception):
    """The job ran past its limit and was killed. `cpu_s` is the CPU time that it got, None if
    that is not known."""

    def __init__(self, text: str, cpu_s: float | None = None) -> None:
        super().__init__(text)
        self.cpu_s = cpu_s


class JobFailedError(Exception):
    """The job raised, or its process died; the text says which."""


class WorkerPool:
    """Runs `handler` ("module:function", or a class made with `arguments`) in worker processes.

    `memory_bytes` bounds the address space of a worker; `environment` is all that it sees of
    this process's (None: the whole). `share_cores`: jobs that only compute take turns, those that
    have used the least CPU time first. `max_wait_s` bounds the wait for a place (None: no bound).
    """

    def __init__(
        self,
        handler: str,
        *,
        arguments: dict[str, Any] | None = None,
        max_jobs: int = 32,
        memory_bytes: int | None = None,
        environment: dict[str, str] | None = None,
        share_cores: bool = False,
        max_wait_s: float | None = None,
    ) -> None:
        self.handler = handler
        self._setup = {
            "handler": handler,
            "arguments": arguments or {},
            "memory_bytes": memory_bytes,
            "share_cores": share_cores,
        }
        self.max_jobs = max_jobs
        self.max_wait_s = max_wait_s
        self._environment = dict(os.environ) if environment is None else environment
        self._slots = asyncio.Semaphore(max_jobs)
        self._num_waiting = 0  # for a place
        self._num_leaving = 0  # gave way, and are being killed
        self._starting = asyncio.Lock()
        self._link: WorkerLink | None = None
        self._number = 0

    async def start(self) -> None:
        """Start the process if there is none. A handler that cannot be loaded: ConfigError."""
        async with self._starting:
            if self._link is not None and not self._link.closed:
                return
            link = WorkerLink(self._environment)
            try:
                link.send(self._setup)
                async with asyncio.timeout(START_TIMEOUT_S):
                    answer = await link.first
                if "failed" in answer:
                    raise ConfigError(f"{self.handler} cannot be loaded: {answer['failed']}")
                if "ready" not in answer:
                    raise GraderError(f"the worker process of {self.handler} died at its start")
                self._link = link
            except TimeoutError:
                raise GraderError(
                    f"the worker process of {self.handler} did not start in {START_TIMEOUT_S:g} s"
                ) from None
            finally:
                if self._link is not link:
                    link.close()

    async def run(self, payload: Any, limit_s: float) -> Any:
        """The handler's result for `payload` (both JSON), within `limit_s` seconds of running.

        Raises JobTimeoutError, JobFailedError, and GraderError when there is no place or process.
        """
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self.max_wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise GraderError(
                f"all {self.max_jobs} workers of {self.handler} have been at work for "
                f"{self.max_wait_s:g} s"
            ) from None
        finally:
            self._num_waiting -= 1
        try:
            return await self._run(payload, limit_s)
        finally:
            self._slots.release()

    async def _run(self, payload: Any, limit_s: float) -> Any:
        await self.start()
        link = self._link
        assert link is not None
        self._number += 1
        number, late, gave_way = self._number, False, False
        answer: dict[str, Any] = {}
        waiting = link.expect(number)
        try:
            link.send({"id": number, "payload": payload})
            gave_way = await self._give_time(waiting, limit_s)
            late = not waiting.done()
            if late:
                self._num_leaving += gave_way
                link.send({"kill": number})
                await asyncio.wait({waiting}, timeout=KILL_TIMEOUT_S)
                self._num_leaving -= gave_way
            answer = waiting.result() if waiting.done() else {}
        finally:
            if not waiting.done():
                link.forget(number)
        if "result" in answer:
            return answer["result"]
        if gave_way:
            raise GraderError(f"a job of {self.handler} gave way to others that waited")
        if late:
            raise JobTimeoutError(f"stopped after {limit_s:g} s", answer.get("cpu_s"))
        raise JobFailedError(answer.get("error", "the worker process died"))

    async def _give_time(self, waiting: asyncio.Future[Any], limit_s: float) -> bool:
        """Wait for an answer up to the limit; true if the job is to give way before."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while self.max_wait_s is not None:
            await asyncio.wait({waiting}, timeout=CHECK_EVERY_S)
            spent_s = loop.time() - start
            if waiting.done() or spent_s >= limit_s:
                return False
            if spent_s >= GIVE_WAY_AFTER_S and self._num_waiting > self._num_leaving:
                return True
        await asyncio.wait({waiting}, timeout=limit_s)
        return False

    def close(self) -> None:
        """Kill the process and its workers; idempotent."""
        if self._link is not None:
            self._link.close()
            self._link = None
