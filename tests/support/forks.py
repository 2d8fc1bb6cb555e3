"""Ranks and commands of this project for tests, as forks of `tests.support.forkserver`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from agentenv.base import offload
from agentenv.base.installation import PACKAGES
from tests.support.forkserver import POLL_S, PYTHON, Forked, ForkServer, fork_server

TRAIN = ("-m", "agentenv.launchers", "train")  # arguments of Python
MODULES = (
    "deepspeed", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
    "agentenv.learners.ranks.rank_process", "agentenv.launchers.__main__",
    "agentenv.launchers.train", "agentenv.launchers.evaluate", "agentenv.training.loop.training",
    "agentenv.training.workers.rollout_worker", "agentenv.evaluation.report",
    "tests.support.pictures:disable",
)  # fmt: skip


def project() -> ForkServer:
    """The fork server of the processes that this project starts."""
    chosen = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return fork_server(sys.executable, MODULES, os.environ | chosen)


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process | Worker:
    """In place of that of agentenv/processes/supervisor.py: a guarded module that the project's
    fork server has imported is a fork."""
    *guard, interpreter, flag, module = command[3:]
    if len(guard) != 1 or flag != "-m" or module not in MODULES or interpreter != sys.executable:
        return await offload.start_process(*command, **options)
    return await start_worker(*command, **options)


class Rank(Forked):
    """The interface of an `asyncio.subprocess.Process` that is used."""

    async def wait(self) -> int:  # type: ignore[override]
        while self.poll() is None:  # noqa: ASYNC110 (any number of tasks wait, and are cancelled)
            await asyncio.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode


class Worker(Rank):
    """A rollout worker below its guard, which ends when its `stdin` is closed."""

    def __init__(self, minder: socket.socket, stdin: BinaryIO) -> None:
        super().__init__(minder)
        self.stdin = stdin


async def start_worker(
    *command: str, stdout: BinaryIO, env: Mapping[str, str], **others: object
) -> Worker:
    """In place of `start_process` in agentenv/processes/supervisor.py."""
    guard, grace_s, module = command[3], command[4], command[-1]
    end, life = os.pipe()
    with os.fdopen(end) as stdin:
        minder = project().fork(
            ["-m", module],
            environment=env,
            folder=Path.cwd(),
            output=stdout.fileno(),
            guard=(guard, grace_s),
            stdin=stdin.fileno(),
        )
    return Worker(minder, os.fdopen(life, "wb"))


class Command(Forked):
    """A launcher as users type it: `python ARGUMENTS ...` at the top of the repository, with `path`
    in front of its PYTHONPATH, and its output in `log`. Killed at the end of `with`. Of the
    processes that it starts, those of `modules` are forks too."""

    def __init__(
        self, *arguments: str, log: Path, path: Sequence[Path] = (), modules: Sequence[str] = ()
    ) -> None:
        self.log = log
        folders = [*map(str, path), str(PACKAGES)]
        chosen = {"PYTHONPATH": os.pathsep.join(folders)}
        if modules:
            chosen[PYTHON] = str(project().stand_in(*modules))
        with log.open("wb") as output:
            super().__init__(
                project().fork(
                    arguments,
                    environment=os.environ | chosen,
                    folder=Path(str(PACKAGES)),
                    output=output.fileno(),
                )
            )

    def read_log(self) -> str:
        """Everything, when it has ended."""
        self.wait()
        return self.log.read_text()

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
