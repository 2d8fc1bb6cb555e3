"""A policy that `agentenv serve` serves, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from agentenv.assembly.keys.evaluation import PolicyConfig
from agentenv.base.config import build_config
from agentenv.evaluation.subject import Subject
from agentenv.launchers.serve import serve_policy

KEY_ENV, KEY = "AGENTENV_TEST_KEY", "a-key"


class ServedPolicy:
    """`keys` are those of PolicyConfig; KEY_ENV must be set."""

    def __init__(self, model: Path, **keys: Any) -> None:
        self.config = build_config(
            PolicyConfig, {"port": 0, "api_key_env": KEY_ENV, **keys}, "test"
        )
        self.subject = Subject(model.name, {}, model, model)
        self.url = ""
        self._ready, self._error = threading.Event(), BaseException()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        assert self.url, repr(self._error)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await serve_policy(self.config, self.subject, lambda _: None, self._until)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()

    async def _until(self, lines: Sequence[str]) -> None:
        self.url = lines[0].rpartition(" is at ")[2]
        self._ready.set()
        await self._stop.wait()
