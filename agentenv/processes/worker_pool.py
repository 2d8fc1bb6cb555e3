"""Worker pools: jobs that may hang, crash or exhaust memory, in killable processes.

    WorkerPool --- control socket ---> fork server: imports the handler once, forks on request
        \\------- one socket each ---> workers: one job at a time, reused for many jobs

The limits of a job are those of its use (CPU time, time asleep, memory), not of its waits for a
slot or, on a busy machine, for a core: its outcome depends on the job, not on the load. SIGKILL
ends a worker over a limit; its successor is a fork, which takes milliseconds.

The fork server is a separate process (`python -m agentenv.processes.worker_pool`), so the host may
have threads, torch and a GPU. When host or fork server dies, the kernel's parent-death signal ends
all their children, which saves the process of a guard (agentenv/processes/guard.py) for each pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, cast

import msgspec

from agentenv.base.deadline import admitted
from agentenv.base.errors import ConfigError, ForeignError, InfraError
from agentenv.base.offload import check_outside
from agentenv.base.untrusted import decode, packed
from agentenv.processes.guard import PR_SET_PDEATHSIG, prctl
from agentenv.processes.link import Link, frame_of, receive_frame

START_TIMEOUT_S = 120.0  # CPU time and time asleep for importing a handler from a cold disk
MAX_ASLEEP_S = 60.0  # for a computing job, which at most waits for the disk
MAX_ANSWER_BYTES = 1 << 26
CHECK_EVERY_S = 0.05  # minimum interval of checks, near the limits of a job
NICE = 1  # lower priority than the host's event loop


class JobError(Exception):
    """A job failed through its own fault, which the text describes."""


class JobStoppedError(JobError):
    """The job exceeded its limit and was killed."""


class JobDiedError(JobError):
    """The process of the job ended twice: by a crash, an exit, or lack of memory."""


class JobRaisedError(JobError):
    """The handler raised."""


class WorkerPool:
    """Runs `handler` ("module:function", or a class made with `arguments`) in worker processes.

    Payloads and results have MessagePack types. At most `max_jobs` run at once (None: the number of
    cores, limited by half of the memory); the others queue. `memory_bytes` limits the address space
    of a worker, `max_asleep_s` the time in which a job does not compute; `environment` replaces the
    environment variables (None: this process's). `name` is the prefix of the metrics.
    """

    def __init__(
        self,
        handler: str,
        *,
        name: str,
        arguments: dict[str, Any] | None = None,
        max_jobs: int | None = None,
        memory_bytes: int | None = None,
        max_asleep_s: float = MAX_ASLEEP_S,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.handler = handler
        self.name = name
        self.max_asleep_s = max_asleep_s
        self._setup = {
            "handler": handler,
            "arguments": arguments or {},
            "memory_bytes": memory_bytes,
        }
        self._environment = dict(os.environ) if environment is None else environment
        self._places = asyncio.Semaphore(max_jobs or _most_jobs(memory_bytes))
        self._starting = asyncio.Lock()
        self._server: _ForkServer | None = None
        self._num_closed = 0
        self._num_jobs = self._num_killed = 0

    async def start(self) -> None:
        """Start the fork server if there is none. Raises ConfigError if the handler cannot be
        loaded, and InfraError if no process can be started."""
        async with self._starting:
            if self._server is not None and self._server.alive():
                return
            self._drop_server()
            server = _ForkServer(self._environment, msgspec.msgpack.encode(self._setup))
            loading = asyncio.ensure_future(server.load(self.handler))
            try:
                if await _over_a_bound(
                    loading, server.process.pid, START_TIMEOUT_S, START_TIMEOUT_S
                ):
                    raise InfraError(f"{self.handler} took over {START_TIMEOUT_S:g} s to load")
                if problem := loading.result():
                    raise ConfigError(f"{self.handler} cannot be loaded: {problem}")
                self._server = server
            finally:
                if self._server is not server:
                    loading.cancel()  # which then releases the server's socket
                    asyncio.get_running_loop().call_soon(server.close)

    async def run(self, payload: Any, limit_s: float) -> Any:
        """The handler's result, after at most `limit_s` seconds of CPU time.

        Raises JobError, and InfraError if no process can be started. A job whose worker dies or
        runs out of memory is retried once in a fresh worker, since other jobs may have used the
        memory.
        """
        async with admitted(self._places, f"a worker slot for {self.handler}"):
            num_closed = self._num_closed
            self._num_jobs += 1
            for last in (False, True):
                server, worker = await self._worker(fresh=last)
                outcome = await self._try(server, worker, payload, limit_s)
                if "result" in outcome:
                    return outcome["result"]
                if "stopped" in outcome:
                    self._num_killed += 1
                    raise JobStoppedError(outcome["stopped"])
                if "error" in outcome and (last or not outcome["error"].startswith("MemoryError")):
                    raise JobRaisedError(outcome["error"])
                if self._num_closed > num_closed:
                    raise InfraError(f"the workers of {self.handler} were closed")
                if last and not server.alive():
                    raise InfraError(f"the fork server of {self.handler} died")
            self._num_killed += 1
            raise JobDiedError("the worker process died")

    def stats(self) -> dict[str, float]:
        """The number of jobs, and of those that were killed or whose process died."""
        return {
            f"{self.name}/num_jobs": self._num_jobs,
            f"{self.name}/num_killed": self._num_killed,
        }

    def close(self) -> None:
        """Kill the processes; the next job starts new ones. Idempotent."""
        self._num_closed += 1
        self._drop_server()

    def _drop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _worker(self, *, fresh: bool) -> tuple[_ForkServer, _Worker]:
        """A worker and its fork server, which is replaced once if it dies."""
        for last in (False, True):
            await self.start()
            server = self._server
            assert server is not None
            try:
                return server, await server.worker(fresh=fresh)
            except _ServerDiedError:
                if server is self._server:
                    self._drop_server()
                if last:
                    raise
        raise AssertionError

    async def _try(
        self, server: _ForkServer, worker: _Worker, payload: Any, limit_s: float
    ) -> dict[str, Any]:
        """The answer of a worker; {"stopped": reason} if it exceeded a limit, {} if it died. Only a
        worker that returned a result is reused."""
        job = asyncio.ensure_future(worker.request({"payload": payload}))
        healthy = False
        try:
            bound_s = await _over_a_bound(job, worker.pid, limit_s, self.max_asleep_s)
            if bound_s:
                return {"stopped": f"stopped after {bound_s:g} s"}
            healthy = "result" in job.result() and server is self._server
            if healthy:
                server.idle.append(worker)
            return job.result()
        finally:
            if not healthy:
                job.cancel()
                worker.kill()


async def _over_a_bound(
    job: asyncio.Future[Any], pid: int, limit_s: float, max_asleep_s: float
) -> float:
    """Wait until a job is done and return 0.0, or return the limit, in seconds of CPU time or of
    time asleep, that its process has reached. Time that it waits for a core counts as neither."""
    loop = asyncio.get_running_loop()
    start, before = loop.time(), _used(pid)
    left_s = min(limit_s, max_asleep_s)
    while not (await asyncio.wait({job}, timeout=max(left_s, CHECK_EVERY_S)))[0]:
        now = _used(pid)
        cpu_s = now.cpu_s - before.cpu_s
        asleep_s = loop.time() - start - cpu_s - (now.delay_s - before.delay_s)
        if cpu_s >= limit_s:
            return limit_s
        if asleep_s >= max_asleep_s and not now.is_runnable:
            return max_asleep_s
        left_s = min(limit_s - cpu_s, max_asleep_s - asleep_s)
    return 0.0


class _ServerDiedError(InfraError):
    """A fork server died before it answered; a new one may work."""


class _ForkServer:
    """The host's end of a fork server, and its idle workers. The server reads the setup from its
    standard input, a file in shared memory, since no pipe takes it at once."""

    def __init__(self, environment: dict[str, str], setup: bytes) -> None:
        check_outside("a worker process")
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with inner:
            try:
                with open(os.memfd_create("setup"), "w+b", buffering=0) as given:
                    given.write(setup)
                    given.seek(0)
                    self.process = subprocess.Popen(
                        [sys.executable, "-m", __name__, str(inner.fileno())],
                        stdin=given,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={**environment, "PYTHONPATH": path},
                        pass_fds=[inner.fileno()],
                    )
            except OSError as error:
                self._control.close()
                raise InfraError(f"no process for workers: {error}") from error
        self._control.setblocking(False)
        self.idle: list[_Worker] = []

    async def load(self, handler: str) -> str:
        """Wait until it has imported the handler; returns "" or the error."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it died, so that there is no answer either
            answer = await loop.sock_recv(self._control, 1 << 16)
            if answer:
                return answer.decode("utf-8", "replace").removeprefix("ready")
        raise InfraError(f"the worker process of {handler} died at its start")

    async def worker(self, *, fresh: bool) -> _Worker:
        """An idle worker, or a newly forked one if there is none or if `fresh`."""
        if self.idle and not fresh:
            return self.idle.pop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                worker = _Worker(Link(*await asyncio.open_unix_connection(sock=ours)))
            except BaseException:
                ours.close()
                raise
            hello: dict[str, Any] = {}
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
                theirs.close()  # so that its end is detected
                async with asyncio.timeout(START_TIMEOUT_S):
                    hello = await worker.receive()
                if not hello:
                    raise _ServerDiedError("no worker process: the fork server died")
                worker.pid = hello["pid"]
                worker.handle = os.pidfd_open(worker.pid)
                return worker
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _ServerDiedError(f"no worker process: {error!r}") from error
            except (OSError, TimeoutError, KeyError) as error:
                raise InfraError(f"no worker process: {hello.get('failed') or error!r}") from error
            finally:
                if worker.handle < 0:
                    worker.kill()

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """Kill the process, and with it its workers."""
        self.process.kill()
        self._control.close()
        while self.idle:
            self.idle.pop().kill()
        threading.Thread(target=self.process.wait, daemon=True).start()  # reaps, never blocks


class Used(NamedTuple):
    """Seconds of CPU time, and of waiting for a core (without the current wait)."""

    cpu_s: float
    delay_s: float
    is_runnable: bool


def _used(pid: int) -> Used:
    """The CPU time and waits of a process; zeros, and asleep, if the kernel does not report
    them."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # first, so that the later file is up to date
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/schedstat") as file:
            cpu_ns, delay_ns, _ = file.read().split()
    except (OSError, ValueError, IndexError):
        return Used(0.0, 0.0, False)
    return Used(int(cpu_ns) * 1e-9, int(delay_ns) * 1e-9, state == "R")


class _Reply(TypedDict, total=False):
    """A frame of a worker."""

    pid: int
    failed: str
    result: Any
    error: str


class _Worker:
    """The host's end of one worker: its link, and a handle that stays valid after its end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._link.max_bytes = MAX_ANSWER_BYTES
        self.pid = 0
        self.handle = -1

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message; {} if the worker is gone."""
        self._link.send(packed(message))
        self._link.flush()
        return await self.receive()

    async def receive(self) -> dict[str, Any]:
        """One frame; {} if the worker is gone or sends an invalid frame."""
        with contextlib.suppress(EOFError, ForeignError):
            return cast(dict[str, Any], decode(await self._link.receive(), _Reply, packed=True))
        return {}

    def kill(self) -> None:
        """Kill the process; idempotent."""
        self._link.abort()
        if self.handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            os.close(self.handle)
            self.handle = -1


# Inside the fork server and its workers.

Handler = Callable[[Any], Any]


def main() -> None:
    """The fork server: load the handler, then fork a worker for each received socket."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):  # they end the host, which closes it
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of workers
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=dict[str, Any])
    try:
        module, _, name = setup["handler"].partition(":")
        handler = getattr(importlib.import_module(module), name)
        if inspect.isclass(handler):
            handler = handler(**setup["arguments"])
    except Exception as error:  # a process boundary: the host reports it
        control.send(f"{type(error).__name__}: {error}"[:2000].encode("utf-8", "replace"))
        return
    gc.collect()
    gc.freeze()  # so that garbage collection in workers does not copy shared pages
    control.send(b"ready")
    while True:
        packet, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not packet:
            return
        with socket.socket(fileno=fds[0]) as sock:
            try:
                pid = os.fork()
            except OSError as error:
                _send(sock, {"failed": str(error)})
                continue
            if pid == 0:
                try:
                    control.close()
                    _serve(handler, sock, setup["memory_bytes"])
                finally:  # a child must never continue as a second fork server
                    os._exit(0)


def _serve(handler: Handler, sock: socket.socket, memory_bytes: int | None) -> None:
    """The loop of a worker: job after job, until the host closes its end."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a handler may start programs
    os.nice(NICE)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(sock, {"pid": os.getpid()})
    while True:
        payload = msgspec.msgpack.decode(receive_frame(sock))["payload"]
        try:
            answer = {"result": handler(payload)}
        except Exception as error:  # a process boundary: the host gets it as text
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        _send(sock, answer)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a frame; values of unknown types become text."""
    sock.sendall(frame_of(packed(message)))


def _most_jobs(memory_bytes: int | None) -> int:
    """The number of cores, limited by the workers that fit into half of this machine's memory at
    their limits."""
    num_cores = len(os.sched_getaffinity(0))
    if memory_bytes is None:
        return num_cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(num_cores, memory // 2 // memory_bytes))


if __name__ == "__main__":
    main()
