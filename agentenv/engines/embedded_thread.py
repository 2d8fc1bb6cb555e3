"""The thread of the embedded engine: it carries out commands between the steps of its scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from msgspec import Struct

from agentenv.engines.embedded_request import Event, Request, settle
from agentenv.engines.embedded_scheduler import Scheduler
from agentenv.errors import EngineError

logger = logging.getLogger(__name__)


class Load(Struct, frozen=True, eq=False):
    """Replace the weights."""

    source: Path
    policy_version: int
    done: asyncio.Future[None]


class Nap(Struct, frozen=True, eq=False):
    """Fall asleep, or wake up."""

    asleep: bool
    done: asyncio.Future[None]


class Cancel(Struct, frozen=True, eq=False):
    """Free the slot of a request."""

    request: Request


class EngineThread:
    """Runs while there is something to step; sleeps until the next command otherwise.

    On the event loop, `deliver` is called with what a step produced, and `on_end` with the reason
    when the thread has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_threads: int,
        deliver: Callable[[list[Event]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reason: str | None = None  # why it has ended
        self.busy_s = 0.0  # CPU seconds
        self._scheduler, self._num_threads = scheduler, num_threads
        self._deliver, self._on_end = deliver, on_end
        self._commands: SimpleQueue[Request | Load | Nap | Cancel | None] = SimpleQueue()
        self._thread: Thread | None = None

    def report_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call back on this loop from now on; the first one starts the thread."""
        self.loop = loop
        if self._thread is None:
            self._thread = Thread(target=self._run, name="embedded-engine", daemon=True)
            self._thread.start()

    def put(self, command: Request | Load | Nap | Cancel) -> None:
        """To be done between two steps, in order. Settles its future, if it has one."""
        self._commands.put(command)

    async def stop(self) -> None:
        """After the commands so far. Idempotent."""
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                self._serve()
        except Exception as error:  # whatever it was, no caller may be left waiting
            reason = f"the engine thread died: {type(error).__name__}: {error}"
            logger.exception("the engine thread died")
        self.reason = reason
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._post(self._on_end, reason)

    def _serve(self) -> None:
        scheduler = self._scheduler
        while True:
            while scheduler.idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                self._apply(command)
            scheduler.step()
            self._flush()

    def _apply(self, command: Request | Load | Nap | Cancel) -> None:
        if isinstance(command, Cancel):
            self._scheduler.cancel(command.request)
        elif isinstance(command, Nap):
            (self._scheduler.sleep if command.asleep else self._scheduler.wake)()
            self._post(settle, command.done, None)
        elif isinstance(command, Load):
            outcome = None
            try:
                self._scheduler.load_weights(command.source, command.policy_version)
            except EngineError as error:
                outcome = error
            self._post(settle, command.done, outcome)
        else:
            self._scheduler.submit(command)
            self._flush()

    def _flush(self) -> None:
        """Send what the last step produced to the loop, all requests at once."""
        self.busy_s = time.thread_time()
        if self._scheduler.events:
            events, self._scheduler.events = self._scheduler.events, []
            self._post(self._deliver, events)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function, *args)
