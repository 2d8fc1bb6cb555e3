"""The terminal: a live line or plain lines during a command, tables, and a log file."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from agentenv.assembly.run.tables import Table, as_rich
from agentenv.base.disk_errors import explain
from agentenv.base.offload import start_thread
from agentenv.base.secrets import SECRETS


class LogFile(logging.Handler):
    """A log file that a thread writes, so that the caller never waits for the disk. `num_missing`
    counts the lines that were lost because the disk was full or hung."""

    MAX_LINES = 10_000  # in the queue
    CLOSE_S = 3.0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.path, self.num_missing, self._is_open = path, 0, True
        self._lines: queue.Queue[bytes | None] = queue.Queue(self.MAX_LINES)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        start_thread(partial(self._write, file), name="run.log")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_missing += 1
        except Exception:  # a format string that does not fit its arguments
            self.handleError(record)

    def _write(self, file: int) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(file, line) :]
            except OSError:
                self.num_missing += 1
            self._lines.task_done()
        os.close(file)

    def flush(self) -> None:
        """Return when all lines are written, or after CLOSE_S."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(
                lambda: not (self._is_open and lines.unfinished_tasks), self.CLOSE_S
            )

    def close(self) -> None:
        """Flush; lines that are still unwritten then count as missing."""
        if self._is_open:
            self.flush()
            self._is_open = False
            self.num_missing += self._lines.qsize()
            with suppress(queue.Full):
                self._lines.put_nowait(None)
        super().close()


class ErrorLines(logging.Handler):
    """Passes to `show` the first line of each error, and of each warning marked SHOWN (with
    `of_all`, of all of them), that another logger emits, and whether it is an error; tracebacks are
    in the log file."""

    def __init__(self, show: Callable[[str, bool], None], *, of_all: bool = False) -> None:
        super().__init__(logging.WARNING)
        self._show, self._unseen = show, ("run", "py.warnings") if of_all else ()

    def emit(self, record: logging.LogRecord) -> None:
        if is_shown(record) or (self._unseen and record.name not in self._unseen):
            self._show(record.getMessage().partition("\n")[0], record.levelno >= logging.ERROR)


def is_shown(record: logging.LogRecord) -> bool:
    """Whether the terminal shows a log record. A View already prints its own records."""
    is_error = record.levelno >= logging.ERROR or getattr(record, "shown", False)
    return record.name != "run" and is_error


class _Stream:
    """Standard output or error, looked up at each write. With `may_be_lost`, output that cannot be
    written (a full disk, a closed terminal) is dropped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.may_be_lost = False
        self.lost: OSError | None = None

    def _now(self) -> TextIO:
        found = getattr(sys, self._name)
        return getattr(found, "rich_proxied_file", found)  # type: ignore[no-any-return]

    def write(self, text: str) -> int:
        self._losing(lambda: self._now().write(SECRETS.known(text)))
        return len(text)

    def flush(self) -> None:
        self._losing(lambda: self._now().flush())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def _losing(self, output: Callable[[], object]) -> None:
        try:
            output()
        except OSError as error:
            if not self.may_be_lost:
                raise
            self.lost = self.lost or error

    def release(self) -> None:
        """At the end of the process, send the remaining output nowhere, so that it cannot fail."""
        if self.lost is not None:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._now().fileno())
                os.close(nowhere)


BUSY_S = 3.0  # until the first progress line of a wait
PLAIN_S = 10.0  # between two progress lines, where the output is no terminal


class Pulse:
    """Progress in plain lines, for a file or a log: at most one line per PLAIN_S seconds, and none
    while other lines appear. Without progress since the last line, it shows the longest wait
    instead of an estimate of the remaining time, which is meaningless during an outage."""

    def __init__(self, view: View, title: str, total: int, done: int = 0, then: str = "") -> None:
        self._view, self._title, self._total, self._first = view, title, total, done
        self._reported = done  # in the last line
        self._then = f"; next: {then}" if then else ""
        self._began_s = view.last_line_s = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        """Print a line if one is due; `done` of the total have ended."""
        now_s = time.monotonic()
        if now_s - self._view.last_line_s < PLAIN_S:
            return
        seconds, left = now_s - self._began_s, ""
        if done == self._reported:
            left = (waits := self._view.longest_wait()) and f"; {waits}"
        elif self._total > done:
            left = f", about {seconds / (done - self._first) * (self._total - done):.0f} s left"
        self._reported = done
        parts = [f"{self._title}: {done} of {self._total}", *filter(None, [note])]
        self._view.log(f"{', '.join(parts)}; {seconds:.0f} s so far{left}{self._then}")


class View:
    """Console and log file of a run; every message goes to both. Once there is a log file, a closed
    terminal, or a full disk under redirected output, does not end the command."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        """`is_quiet`: print only warnings and errors."""
        self._streams = [_Stream("stdout"), _Stream("stderr")]
        out, errors = cast(list[TextIO], self._streams)
        is_notebook = type(sys.stdout).__module__.startswith("ipykernel")  # which has no bars
        shown: dict[str, Any] = {"highlight": False, "force_jupyter": False}
        shown["force_terminal"] = False if is_notebook else None
        self.console = Console(file=out, quiet=is_quiet, **shown)
        self._errors = Console(file=errors, stderr=True, **shown)
        self._waiting: threading.Event | None = None  # set at the end of the wait
        self._next: list[RichTable | Text] = []  # below the progress bar
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._pulse: Pulse | None = None
        self.last_line_s = 0.0  # time of the last line, of time.monotonic
        self._logger = logging.getLogger("run")
        if not self._logger.handlers:  # else early failures are reported twice
            self._logger.addHandler(logging.NullHandler())
        self._handlers: list[logging.Handler] = []
        self.folder: Path | None = None  # of a run, whose log is there
        self.activity = ""  # work that an interruption waits for
        self.longest_wait: Callable[[], str] = str  # a description; empty: none

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Inside, an interruption waits for this activity; the terminal then names it."""
        before, self.activity = self.activity, activity
        try:
            yield
        finally:
            self.activity = before

    def hold(self) -> None:
        """Show each warning of all loggers, and keep it for the file of a later `log_to`."""
        if not self._handlers:
            held = MemoryHandler(1, flushLevel=sys.maxsize, flushOnClose=False)
            held.setLevel(logging.WARNING)
            self._listen(held, ErrorLines(self._print_problem, of_all=True))

    def log_to(self, path: Path) -> None:
        """Also write messages, and the log records of all loggers, to the file `path`."""
        before, file = self._handlers, LogFile(path)
        self._listen(file, ErrorLines(self._print_problem))
        self.folder = path.parent
        for stream in self._streams:
            stream.may_be_lost = True
        for handler in before:
            logging.getLogger().removeHandler(handler)
            if isinstance(handler, MemoryHandler):
                handler.setTarget(file)
                handler.flush()
        self._logger.setLevel(logging.INFO)

    def _listen(self, *handlers: logging.Handler) -> None:
        self._handlers = [*handlers]
        for handler in handlers:
            logging.getLogger().addHandler(handler)

    def log(self, text: str, brief: str = "") -> None:
        """Print and log a text; on a terminal that is too narrow for it, print `brief` instead."""
        self.last_line_s, text, brief = time.monotonic(), SECRETS.text(text), SECRETS.text(brief)
        self._logger.info(text)
        is_narrow = self.console.is_terminal and len(text) > self.console.width
        self.console.print(escape(brief if brief and is_narrow else text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print and log a warning."""
        self._logger.warning(text)
        self._print_problem(text, False)

    def warn_at_once(self, text: str) -> None:
        """As `warn`, and flush the log file, if its disk responds."""
        self.warn(text)
        for handler in self._handlers:
            handler.flush()

    def fail(self, text: str) -> None:
        self._logger.error(text)
        self.end()
        self._print_problem(text, True)

    def _print_problem(self, text: str, is_error: bool) -> None:
        """Print on standard error; above the progress bar, if there is one."""
        word = "[bold red]error:[/]" if is_error else "[bold yellow]warning:[/]"
        above, shown = self.is_live and self._errors.is_terminal, escape(SECRETS.text(text))
        (self.console if above else self._errors).print(f"{word} {shown}", soft_wrap=True)

    def suggest(self, commands: Mapping[str, str]) -> None:
        """Print the commands to run next, each with its use."""
        width, most = max(map(len, commands)), max(map(len, commands.values()))
        is_wide = width + most + len("    # ") > self.console.width
        self.log("\nnext:")
        for command, use in commands.items():
            text = f"  # {use}\n  {command}" if is_wide else f"  {command.ljust(width)}  # {use}"
            self.log(text)

    def show(self, table: Table) -> None:
        """Print a table, and write it to the log file as well."""
        plain, shown = StringIO(), as_rich(table)
        width = self.console.width
        Console(file=plain, width=width, color_system=None, force_jupyter=False).print(shown)
        self._logger.info("\n%s", plain.getvalue())
        self.console.print(shown)

    def wait_for(self, what: str, then: str = "") -> None:
        """Until `end` or `begin`, show the seconds that `what` has taken, and the next phase,
        `then`. Without a terminal: in a line after BUSY_S seconds, and then every PLAIN_S."""
        self.end()
        after = f"; next: {then}" if then else ""
        if self.console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            waiting = Progress(*columns, TextColumn(f"[dim]{escape(after.removeprefix('; '))}"))
            waiting.add_task(escape(what), total=None)
            self._live = Live(waiting, console=self.console, transient=True)
            self._live.start()
            return
        self._waiting = over = threading.Event()

        def report() -> None:
            began_s, pause_s = time.monotonic(), BUSY_S
            while not over.wait(pause_s):
                self.log(f"{what}: {time.monotonic() - began_s:.0f} s so far{after}")
                pause_s = PLAIN_S

        with suppress(RuntimeError):  # a simulated machine has no threads
            start_thread(report, "waiting")

    def begin(self, title: str, total: int, done: int = 0, then: str = "") -> None:
        """Start a progress bar, with the next phase, `then`, below it. Without a terminal: progress
        lines at intervals (Pulse)."""
        self.end()
        if not self.console.is_terminal:
            self._pulse = Pulse(self, title, total, done, then)
            return
        self._next = [Text(f"next: {then}", style="dim")] if then else []
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress.add_task(title, total=total, completed=done, note="")
        shown = Group(self._progress, *self._next)
        self._live = Live(shown, console=self.console, transient=True)
        self._live.start()

    def advance(self, done: int, note: str = "") -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, note=note)
        elif self._pulse is not None:
            self._pulse.update(done, note)

    def figures(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show lines of (title, figures) below the progress bar; only on a terminal."""
        if self._live is None or self._progress is None:
            return
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=max(len(title) for title, _ in rows))
        grid.add_column(overflow="ellipsis", no_wrap=True)
        for title, text in rows:
            grid.add_row(title, escape(SECRETS.text(text)))
        self._live.update(Group(self._progress, grid, *self._next))

    @property
    def is_live(self) -> bool:
        return self._live is not None

    @property
    def is_idle(self) -> bool:
        """Whether no progress is shown."""
        return self._live is None and self._pulse is None

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.set()
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = self._pulse = self._waiting = None

    def close(self) -> None:
        self.end()
        for stream in self._streams:
            if stream.lost is not None:
                reason = explain(stream.lost)
                self._logger.warning("the terminal, or its file, could not be written: %s", reason)
            stream.release()
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
            if isinstance(handler, LogFile) and handler.num_missing:
                self.warn(
                    f"{handler.num_missing} lines are missing in {handler.path}: the disk is full "
                    "or does not respond"
                )
        self._handlers = []
