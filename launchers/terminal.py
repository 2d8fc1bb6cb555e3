"""The terminal: what a person sees while a command goes on, a live line or plain lines, and how
every command ends, with which exit code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

from agentenv.errors import AgentEnvError, ConfigError, DataError
from launchers.event_loop import Watchdog
from launchers.rundir import explain
from launchers.tables import Table, as_rich

T = TypeVar("T")


class _LogFile(logging.FileHandler):
    """A log file that a full disk does not turn into tracebacks; the run says what is wrong."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class View:
    """Console and log file of a run. Everything said goes to both."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._live: Live | None = None
        self._logger = logging.getLogger("run")
        self._logger.addHandler(logging.NullHandler())  # else what fails early is told twice
        self._handler: logging.Handler | None = None

    def log_to(self, path: Path) -> None:
        """Write what is said, and the warnings of all parts, to `path` as well."""
        self._handler = _LogFile(path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root = logging.getLogger()
        root.addHandler(self._handler)
        self._logger.setLevel(logging.INFO)

    def say(self, text: str) -> None:
        self._logger.info(text)
        self.console.print(escape(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something is wrong, and the command goes on."""
        self._logger.warning(text)
        self._errors.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)

    def fail(self, text: str) -> None:
        self._logger.error(text)
        self._errors.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)

    def show(self, table: RichTable | Table) -> None:
        """Print a table, and write it to the log file as well."""
        if isinstance(table, Table):
            table = as_rich(table)
        with self.console.capture() as capture:
            self.console.print(table)
        self._logger.info("\n%s", capture.get())
        self.console.print(table)

    def begin(self, title: str, total: int, done: int = 0) -> None:
        """Start a progress bar; in a terminal only."""
        self.end()
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = self._progress.add_task(title, total=total, completed=done, note="")
        self._live = Live(self._progress, console=self.console, transient=True)
        self._live.start()

    def advance(self, done: int, note: str = "") -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done, note=note)

    def figures(self, rows: Sequence[tuple[str, str]]) -> None:
        """What stands below the bar: a title and figures a line. Nothing outside a terminal."""
        if self._live is None or self._progress is None:
            return
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        for title, text in rows:
            grid.add_row(title, escape(text))
        self._live.update(Group(self._progress, grid))

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = self._bar = None

    def close(self) -> None:
        self.end()
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXIT_MISSING = 3  # of a dry run: nothing is wrong, something is not here


def import_from_working_directory() -> None:
    """Let the user's modules be found where the command is run, as with `python -m`; the folder
    of the launchers itself, which Python puts there instead, would shadow names of theirs."""
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def to_its_end(
    work: Callable[[], int | None], view: View, *, writing: str, interrupted: str = ""
) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 not all is here (of a
    dry run), 130 interrupted.

    The user's modules are found where the command is run. `writing` is said of a failure of files
    that names none, `interrupted` after Ctrl-C. Whatever has no reason for the user is a bug and
    is raised.
    """
    import_from_working_directory()
    try:
        return work() or 0
    except KeyboardInterrupt:
        view.end()
        if interrupted:
            view.say(interrupted)
        return EXIT_INTERRUPTED
    except OSError as error:
        view.fail(f"{error.filename or writing}: {explain(error)}")
        return EXIT_FAILED
    except (AgentEnvError, ExceptionGroup) as error:
        reason = first_reason(error)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    finally:
        view.close()


def run_until_done(work: Coroutine[Any, Any, T], view: View) -> T:
    """Run the work of a command to its end. SIGTERM cancels the work as Ctrl-C does; after either
    of them this raises KeyboardInterrupt. `view` tells who holds up the event loop."""
    runner = asyncio.Runner()
    loop = runner.get_loop()

    def stop_soon(task: asyncio.Task[Any]) -> None:
        loop.call_soon_threadsafe(task.cancel)

    async def main() -> T:
        this = asyncio.current_task()
        assert this is not None
        signal.signal(signal.SIGTERM, lambda *_: stop_soon(this))
        return await work

    raise_file_limit()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Watchdog(loop, view.warn).watch(), runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


MAX_FILES = 65536


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files and connections as it may;
    each running request is a connection, and shells begin with a limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_reason(error: BaseException) -> AgentEnvError | OSError | None:
    """The first failure with a reason for the user; None if there is a bug among the errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, AgentEnvError | OSError) else None
    reasons = [first_reason(part) for part in error.exceptions]
    return None if None in reasons else reasons[0]
