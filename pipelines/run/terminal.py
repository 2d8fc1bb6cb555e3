"""The terminal: a live line or plain lines during a command, tables, and the end of every command
with its exit code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from agentenv.disk import DIR_KEY, explain, written
from agentenv.errors import TRAIN, AgentEnvError, ConfigError, DataError, MissingError, needs_train
from agentenv.offload import hanging, running, start_thread
from agentenv.pipelines.run.arguments import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    check_places,
    import_from_working_directory,
)
from agentenv.pipelines.run.tables import Table, as_rich
from agentenv.pipelines.run.watchdog import ENDING, GRACE_S, CommandLoop, Watchdog, share_heap

T = TypeVar("T")


class LogFile(logging.Handler):
    """A log file that a thread writes, so that no disk holds up the caller. Lines that a full disk
    refuses, or a disk that hangs does not take in time, are counted in `num_missing`."""

    MAX_LINES = 10_000  # that wait for the disk
    CLOSE_S = 3.0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.path, self.num_missing = path, 0
        self._lines: queue.Queue[bytes | threading.Event] = queue.Queue(self.MAX_LINES)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        start_thread(partial(self._write, self._file), name="run.log")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_missing += 1
        except Exception:  # a message that its arguments do not fit
            self.handleError(record)

    def _write(self, file: int) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                if self._file is None:
                    return os.close(file)
                continue
            try:
                while line:
                    line = line[os.write(file, line) :]
            except OSError:
                self.num_missing += 1

    def flush(self) -> None:
        """Returns when all lines are written, or CLOSE_S later."""
        if self._file is None:
            return
        written, by = threading.Event(), time.monotonic() + self.CLOSE_S
        with suppress(queue.Full):
            self._lines.put(written, timeout=self.CLOSE_S)
            written.wait(by - time.monotonic())

    def close(self) -> None:
        """As flush; lines that are not written by then are missing."""
        if self._file is not None:
            self.flush()
            self._file = None
            self.num_missing += self._lines.qsize()
            with suppress(queue.Full):
                self._lines.put_nowait(threading.Event())
        super().close()


class _Errors(logging.Handler):
    """What the parts log as errors, and as warnings for people (SHOWN), one line each on the
    terminal; tracebacks are in the log."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if is_shown(record):
            line = record.getMessage().partition("\n")[0]
            is_error = record.levelno >= logging.ERROR
            word = "[bold red]error:[/]" if is_error else "[bold yellow]warning:[/]"
            self._show(f"{word} {escape(line)}")


def is_shown(record: logging.LogRecord) -> bool:
    """Whether people are to see what a part has logged; what a View has, it has printed."""
    is_error = record.levelno >= logging.ERROR or getattr(record, "shown", False)
    return record.name != "run" and is_error


class _Stream:
    """Standard output or error of the process, whatever it is at the time. Once it may be lost (a
    full disk, a terminal that is gone), what cannot be written there is dropped."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.may_be_lost = False
        self.lost: OSError | None = None

    def _now(self) -> TextIO:
        found = getattr(sys, self._name)
        return getattr(found, "rich_proxied_file", found)  # type: ignore[no-any-return]

    def write(self, text: str) -> int:
        with self._losing():
            self._now().write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self._now().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.may_be_lost:
                raise
            self.lost = self.lost or error

    def release(self) -> None:
        """Nothing fails any more for what is still to be written, at the end of the process."""
        if self.lost is not None:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._now().fileno())
                os.close(nowhere)


BUSY_S = 3.0  # after which a line says that something takes its time
PLAIN_S = 10.0  # between two lines of how far a command is, where no bar shows it


class Pulse:
    """Says how far something is in plain lines, for a file or a log: at most one in PLAIN_S
    seconds, and none while other lines come. Where nothing has ended since the last one, it has the
    longest wait in place of a forecast, which an outage would only raise."""

    def __init__(self, view: View, title: str, total: int, done: int = 0, then: str = "") -> None:
        self._view, self._title, self._total, self._first = view, title, total, done
        self._said = done  # in the last line
        self._then = f"; next: {then}" if then else ""
        self._began_s = view.said_s = time.monotonic()

    def look(self, done: int, note: str = "") -> None:
        """Say it if it is time to; `done` of the total are."""
        now_s = time.monotonic()
        if now_s - self._view.said_s < PLAIN_S:
            return
        seconds, left = now_s - self._began_s, ""
        if done == self._said:
            left = (waits := self._view.behind()) and f"; {waits}"
        elif self._total > done:
            left = f", about {seconds / (done - self._first) * (self._total - done):.0f} s left"
        self._said = done
        parts = [f"{self._title}: {done} of {self._total}", *filter(None, [note])]
        self._view.say(f"{', '.join(parts)}; {seconds:.0f} s so far{left}{self._then}")


class View:
    """Console and log file of a run. Everything said goes to both; where there is a log file, a
    terminal that is gone, or a full disk behind it, is no reason to end."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        """A quiet one prints warnings and errors alone."""
        self._streams = [_Stream("stdout"), _Stream("stderr")]
        out, errors = cast(list[TextIO], self._streams)
        is_notebook = type(sys.stdout).__module__.startswith("ipykernel")  # which has no bars
        shown: dict[str, Any] = {"highlight": False, "force_jupyter": False}
        shown["force_terminal"] = False if is_notebook else None
        self.console = Console(file=out, quiet=is_quiet, **shown)
        self._errors = Console(file=errors, stderr=True, **shown)
        self._waiting: threading.Event | None = None  # set when it is over
        self._next: list[RichTable | Text] = []  # what a bar has below it
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._live: Live | None = None
        self._pulse: Pulse | None = None
        self.said_s = 0.0  # when a line was said last, of time.monotonic
        self._logger = logging.getLogger("run")
        if not self._logger.handlers:  # else early failures are reported twice
            self._logger.addHandler(logging.NullHandler())
        self._handlers: list[logging.Handler] = []
        self.folder: Path | None = None  # of a run, whose log is there
        self.activity = ""  # what comes to its end first when the command is interrupted
        self.behind: Callable[[], str] = str  # says who has waited longest for what

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Inside, an interruption waits until this has finished, and is notified of that."""
        before, self.activity = self.activity, activity
        try:
            yield
        finally:
            self.activity = before

    def log_to(self, path: Path) -> None:
        """Write what is said, and the warnings of all parts, to `path` as well."""
        self._handlers = [LogFile(path), _Errors(self._print_error)]
        self.folder = path.parent
        for stream in self._streams:
            stream.may_be_lost = True
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        self._logger.setLevel(logging.INFO)

    def say(self, text: str, brief: str = "") -> None:
        """Print and log a text; on a terminal that it does not fit into, print the `brief` one."""
        self.said_s = time.monotonic()
        self._logger.info(text)
        is_narrow = self.console.is_terminal and len(text) > self.console.width
        self.console.print(escape(brief if brief and is_narrow else text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something is wrong, and the command goes on."""
        self._logger.warning(text)
        self._print_error(f"[bold yellow]warning:[/] {escape(text)}")

    def warn_at_once(self, text: str) -> None:
        """As `warn`, and the log file has it when this returns, if its disk answers."""
        self.warn(text)
        for handler in self._handlers:
            handler.flush()

    def fail(self, text: str) -> None:
        self._logger.error(text)
        self.end()
        self._print_error(f"[bold red]error:[/] {escape(text)}")

    def _print_error(self, text: str) -> None:
        """On standard error; while a bar moves there, above it."""
        above = self.is_live and self._errors.is_terminal
        (self.console if above else self._errors).print(text, soft_wrap=True)

    def suggest(self, commands: Mapping[str, str]) -> None:
        """The last lines: commands that may come next, each with its use."""
        width, most = max(map(len, commands)), max(map(len, commands.values()))
        is_wide = width + most + len("    # ") > self.console.width
        self.say("\nnext:")
        for command, use in commands.items():
            text = f"  # {use}\n  {command}" if is_wide else f"  {command.ljust(width)}  # {use}"
            self.say(text)

    def show(self, table: RichTable | Table) -> None:
        """Print a table, and write it to the log file as well."""
        if isinstance(table, Table):
            table = as_rich(table)
        plain = StringIO()
        width = self.console.width
        Console(file=plain, width=width, color_system=None, force_jupyter=False).print(table)
        self._logger.info("\n%s", plain.getvalue())
        self.console.print(table)

    def wait_for(self, what: str, then: str = "") -> None:
        """From now on, until `end` or `begin`, it is shown how long `what` takes and what comes
        `then`; where there is no terminal by a line after BUSY_S seconds, and at intervals."""
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

        def tell() -> None:
            began_s, pause_s = time.monotonic(), BUSY_S
            while not over.wait(pause_s):
                self.say(f"{what}: {time.monotonic() - began_s:.0f} s so far{after}")
                pause_s = PLAIN_S

        with suppress(RuntimeError):  # a simulated machine has no threads
            start_thread(tell, "waiting")

    def begin(self, title: str, total: int, done: int = 0, then: str = "") -> None:
        """Start a progress bar, and what comes `then` below it; where there is no terminal, lines
        at intervals say how far it is."""
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
        self._bar = self._progress.add_task(title, total=total, completed=done, note="")
        shown = Group(self._progress, *self._next)
        self._live = Live(shown, console=self.console, transient=True)
        self._live.start()

    def advance(self, done: int, note: str = "") -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done, note=note)
        elif self._pulse is not None:
            self._pulse.look(done, note)

    def figures(self, rows: Sequence[tuple[str, str]]) -> None:
        """What stands below the bar: a title and figures a line. Nothing outside a terminal."""
        if self._live is None or self._progress is None:
            return
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=max(len(title) for title, _ in rows))
        grid.add_column(overflow="ellipsis", no_wrap=True)
        for title, text in rows:
            grid.add_row(title, escape(text))
        self._live.update(Group(self._progress, grid, *self._next))

    @property
    def is_live(self) -> bool:
        return self._live is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is shown to go on."""
        return self._live is None and self._pulse is None

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.set()
        if self._live is not None:
            self._live.stop()
        self._live = self._progress = self._bar = self._pulse = self._waiting = None

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


def exit_code_of(
    work: Callable[[], int | None], view: View, *, writing: str, interrupted: str = ""
) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted.

    The user's modules are found where the command is run. `writing` is said of a failure of files
    that names none, `interrupted` after Ctrl-C. Whatever has no reason for the user is a bug and
    is raised.
    """
    import_from_working_directory()
    try:
        with others_in_log():
            code = _code_of(work, view, writing, interrupted)
    except Exception:
        if not hanging():
            raise
        traceback.print_exc()
        code = EXIT_FAILED
    if stuck := hanging():  # the interpreter would wait for them before it ends
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"ended without {', '.join(map(str, stuck))}\n")
            sys.stderr.flush()
        os._exit(code)
    return code


def _code_of(work: Callable[[], int | None], view: View, writing: str, interrupted: str) -> int:
    try:
        check_places()
        return work() or 0
    except KeyboardInterrupt:
        view.end()
        if interrupted:
            view.say(interrupted)
        return EXIT_INTERRUPTED
    except (ImportError, OSError, AgentEnvError, ExceptionGroup) as error:
        reason = reason_of(error, view.folder, writing)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    finally:
        view.close()


@contextmanager
def others_in_log() -> Iterator[None]:
    """Inside, warnings of other packages are in the log of a run, and on no terminal."""
    logging.captureWarnings(True)
    try:
        with without_deepspeed():
            yield
    finally:
        logging.captureWarnings(False)


@contextmanager
def without_deepspeed() -> Iterator[None]:
    """Inside, DeepSpeed logs errors alone: whatever loads transformers imports it, and it warns on
    standard output of a machine without a GPU."""
    logger = logging.getLogger("DeepSpeed")

    def is_grave(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_grave)
    try:
        yield
    finally:
        logger.removeFilter(is_grave)


def reason_of(
    error: BaseException, folder: Path | None, writing: str
) -> AgentEnvError | OSError | None:
    """The error with the text that users see; None for a bug. `folder` is that of the run,
    `writing` is said of a failure of files that names none."""
    if isinstance(error, ModuleNotFoundError):
        return MissingError(needs_train(error.name)) if error.name in TRAIN else None
    reason = first_reason(error)
    if not isinstance(reason, OSError):
        return reason
    name = written(reason)
    inside = folder is not None and folder in Path(str(name)).parents
    key = DIR_KEY if inside else ""
    return OSError(f"{name or writing}: {explain(reason, key)}")


SHOWN_S = 2.0  # in a thread, until it is shown that somebody waits for it


def run_until_done(work: Coroutine[Any, Any, T], view: View) -> T:
    """Run the work of a command to its end. The first Ctrl-C, SIGTERM or SIGHUP cancels the work,
    which may save before it ends; after that this raises KeyboardInterrupt. A second one prints
    what it waits for, and a third ends the process (see Watchdog). `view` reports code that blocks
    the loop.
    """
    runner = asyncio.Runner(loop_factory=CommandLoop)
    loop = runner.get_loop()
    dog = Watchdog(loop, view.warn_at_once)
    num_signals = 0

    def stop(task: asyncio.Task[Any]) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            task.cancel()  # once: a second one would interrupt the clean-up
        first = "interrupted" if num_signals == 1 else "still shutting down"
        jobs = ", ".join(map(str, running(SHOWN_S)))
        waits = [view.activity and f"waiting for {view.activity}", view.behind(), jobs]
        what = "; ".join(filter(None, [first, *waits]))
        view.say(f"{what} (a third signal within {GRACE_S:g} s ends the command at once)")

    async def main() -> T:
        dog.hear()
        this = asyncio.current_task()
        assert this is not None

        def on_signal(*_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: the command has ended
                loop.call_soon_threadsafe(stop, this)

        for number in taken:
            signal.signal(number, on_signal)
        try:
            return await work
        finally:
            leave_hanging(loop)

    raise_file_limit()
    share_heap()
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    taken = [number for number in ENDING if not (is_detached and number == signal.SIGHUP)]
    before = [signal.getsignal(number) for number in taken]
    try:
        with dog.watch(), runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in zip(taken, before, strict=True):
            signal.signal(number, handler)


def leave_hanging(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop close without the threads that hang."""
    if hanging():
        loop.set_default_executor(ThreadPoolExecutor(1))


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
