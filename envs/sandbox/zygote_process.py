"""The host's side of a zygote: starts it on its rung, orders sessions, ends it."""

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

from agentenv.errors import ConfigError, InfraError
from envs.sandbox.bubblewrap import HERE, NAMESPACES_ADVICE, bubblewrap
from envs.sandbox.channel import Channel, ChannelClosedError
from envs.sandbox.interpreter import find_interpreter
from envs.sandbox.settings import Rung, SandboxSetup, check_missing, check_rung, settings_of

START_TIMEOUT_S = 60.0  # imports what is preloaded, perhaps from a cold disk
STOP_TIMEOUT_S = 5.0


class ZygoteProcess:
    """One running zygote; `rung` says what confines its sessions."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, rung: Rung
    ) -> None:
        self.rung = rung
        self._process = process
        self._control = control
        self._numbers = count(1)
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()

    @classmethod
    async def launch(cls, setup: SandboxSetup, rung: Rung) -> ZygoteProcess:
        """Start one. A ConfigError says what this machine, or the interpreter, lacks."""
        python = await find_interpreter(setup.interpreter)
        check_rung(setup.limits, rung)
        prefix = bubblewrap(python) if rung == "namespaces" else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            script = "/sandbox/zygote.py" if rung == "namespaces" else str(HERE / "zygote.py")
            settings = settings_of(setup, python, rung, theirs.fileno())
            try:
                # on the loop's own thread: the zygote dies with the thread that started it
                process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, once
                    [*prefix, python.program, "-s", "-B", script, settings],
                    env={} if rung == "namespaces" else {"PYTHONHASHSEED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"the Python sandbox cannot start: {error}") from error
        zygote = cls(process, ours, rung)
        started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
            if not report:
                await zygote._refuse()
            check_missing(msgspec.json.decode(report)["missing"], python)
            started = True
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
