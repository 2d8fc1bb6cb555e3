"""An event loop in a thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, ClassVar, TypeVar

from agentenv.errors import EnvError
from agentenv.shared import close_shared

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, which all envs of the process share while there are any."""

    _current: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._num_users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentenv-gym")
        self._thread.daemon = True  # an env that nobody closes must not keep the process alive
        self._thread.start()

    @classmethod
    def acquire(cls) -> LoopThread:
        """The running loop, or a new one."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    def release(self) -> None:
        """The last user closes what the episodes shared, and stops the loop."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            type(self)._current = None
            try:
                self.run(close_shared(), 60.0)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run it in the loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise EnvError(f"the environment did not answer within {timeout_s:g} s") from error
