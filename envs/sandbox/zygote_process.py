"""The host's side of a zygote: starts it inside bubblewrap, orders sessions, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import deque
from contextlib import suppress
from itertools import count

import msgspec
from msgspec import Struct

from agentenv.errors import ConfigError, InfraError
from envs.sandbox.bubblewrap import HERE, NAMESPACES_ADVICE, bubblewrap, interpreter
from envs.sandbox.channel import Channel, ChannelClosedError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
UNUSED_ID = 1_948_000_000  # uid and gid of model-written code when the host runs as root


class SandboxLimits(Struct, frozen=True):
    """Bounds of one session. max_processes counts the interpreter itself and its threads: with 1
    nothing outlives a call and memory_bytes is a true bound."""

    memory_bytes: int = 512 << 20
    cpu_s: int = 600
    max_processes: int = 1
    max_open_files: int = 64
    tmp_bytes: int = 16 << 20
    max_output_chars: int = 8000


class ZygoteProcess:
    """One running zygote. `isolated` says whether it lives inside bubblewrap."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, isolated: bool
    ) -> None:
        self.isolated = isolated
        self._process = process
        self._control = control
        self._numbers = count(1)
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()

    @classmethod
    async def launch(cls, limits: SandboxLimits, isolated: bool) -> ZygoteProcess:
        """Start one. A ConfigError says what this machine lacks."""
        python = interpreter()
        prefix = bubblewrap(python) if isolated else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            script = "/sandbox/zygote.py" if isolated else str(HERE / "zygote.py")
            settings = _settings(limits, isolated, theirs.fileno())
            try:
                # on the loop's own thread: the zygote dies with the thread that started it
                process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, once
                    [*prefix, python, "-s", "-B", script, settings],
                    env={} if isolated else {"PYTHONHASHSEED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"the Python sandbox cannot start: {error}") from error
        zygote = cls(process, ours, isolated)
        started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started = bool(await asyncio.get_running_loop().sock_recv(ours, 16))
            if not started:
                await zygote._refuse()
        except TimeoutError as error:
            raise InfraError(f"the sandbox did not start in {START_TIMEOUT_S:g} s") from error
        finally:
            if not started:
                await zygote.stop()
        return zygote

    def alive(self) -> bool:
        """False once the zygote is gone, even before any of its sessions is."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def spawn(self, seed: int) -> tuple[int, Channel]:
        """A new session, ready to run cells. Raises InfraError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        self._post({"spawn": number, "seed": seed}, theirs)
        ready = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await channel.receive()
            ready = answer.ready
            if not ready:
                raise InfraError(f"a sandbox session did not start: {answer.error}")
        except TimeoutError as error:
            raise InfraError(f"no sandbox session within {START_TIMEOUT_S:g} s") from error
        except ChannelClosedError as error:
            raise InfraError(f"a sandbox session died at its start: {error}") from error
        finally:
            if not ready:
                self.kill(number, channel)
        return number, channel

    def kill(self, number: int, channel: Channel) -> None:
        """End a session, whatever it is doing; never waits."""
        channel.close()
        self._post({"kill": number}, None)

    async def stop(self) -> None:
        """End the zygote and everything in it, and see it gone."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._control)
        while self._outgoing:
            self._drop_first()
        self._control.close()
        burying = loop.run_in_executor(None, self._bury)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(burying)
        except TimeoutError:
            self._kill_group()
            await burying
        finally:
            if not burying.done():  # cancelled: no time to be polite
                self._kill_group()

    # inner workings

    def _post(self, request: dict[str, int], attached: socket.socket | None) -> None:
        if self._control.fileno() < 0:  # stopped: there is nobody to tell
            if attached is not None:
                attached.close()
            return
        self._outgoing.append((msgspec.json.encode(request), attached))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outgoing:
            packet, attached = self._outgoing[0]
            fds = [] if attached is None else [attached.fileno()]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                pass  # the zygote is gone; whoever waits for an answer reads the end of file
            self._drop_first()
        loop.remove_writer(self._control)

    def _drop_first(self) -> None:
        _, attached = self._outgoing.popleft()
        if attached is not None:
            attached.close()

    def _bury(self) -> None:
        """Blocks until the process is gone, then sees that nothing of its group is left."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # while the dead leader is not reaped, the group's id is ours
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _kill_group(self) -> None:
        """bubblewrap itself may not kill a zygote that is another user by now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _refuse(self) -> None:
        """The process ended before it was ready: say why."""
        _, errors = await asyncio.get_running_loop().run_in_executor(
            None, self._process.communicate
        )
        reason = errors.decode(errors="replace").strip()[-500:] or "no reason given"
        forbidden = "namespace" in reason or "ermi" in reason
        advice = f". {NAMESPACES_ADVICE}" if forbidden else ""
        raise ConfigError(f"the Python sandbox cannot start: {reason}{advice}")


def _settings(limits: SandboxLimits, isolated: bool, control_fd: int) -> str:
    """What the zygote reads from its command line."""
    config = {
        "control_fd": control_fd,
        "isolated": isolated,
        # process limits do not bind uid 0
        "uid": UNUSED_ID if isolated and os.geteuid() == 0 else None,
        "tmp_bytes": limits.tmp_bytes,
        "max_output_chars": limits.max_output_chars,
        "rlimits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.max_processes,
            "NOFILE": limits.max_open_files,
            "FSIZE": limits.tmp_bytes,
        },
    }
    return msgspec.json.encode(config).decode()
