"""The work of a command, from the start of its event loop to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from agentenv.assembly.run.garbage import share_heap
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.watchdog import ENDING, GRACE_S, CommandLoop, Watchdog
from agentenv.base import errors
from agentenv.base.disk import undecodable
from agentenv.base.disk_errors import DIR_KEY, explain, written
from agentenv.base.installation import TRAIN, needs_train
from agentenv.base.offload import hanging, running
from agentenv.base.registry import import_from_working_directory
from agentenv.base.secrets import seal_output
from agentenv.contract.request import passes

T = TypeVar("T")

PLACES = ("HOME", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")


def check_places() -> None:
    """Raises ConfigError if the path of the working directory, or of a folder in an environment
    variable (PLACES), is not UTF-8."""
    paths = {"the working directory": os.getcwd()}
    paths |= {f"the environment variable {name}": os.environ.get(name, "") for name in PLACES}
    for name, text in paths.items():
        if shown := undecodable(text):
            raise errors.ConfigError(
                f"{name}: {shown!r} is not valid UTF-8; rename the folder, or choose another"
            )


def exit_code_of(
    work: Callable[[View], int | None],
    writing: str,
    *,
    interrupted: str = "",
    view: View | None = None,
) -> int:
    """Run the work of a command. Returns the exit code: 0 done, 1 failed with a reason, 2 bad
    input, 3 something is missing (dry run only), 130 interrupted.

    The user's modules are imported from the working directory. `writing`
    names the activity in an I/O error that names no file; `interrupted` is printed after Ctrl-C.
    An error without a reason for the user is a bug and is raised.
    """
    import_from_working_directory()
    logging.captureWarnings(True)  # those of other packages go to the log of the run
    view = view or View()
    view.hold()
    seal_output()
    try:
        with without_deepspeed():
            check_places()
            code = work(view) or 0
    except KeyboardInterrupt:
        view.end()
        if interrupted:
            view.log(interrupted)
        code = errors.EXIT_INTERRUPTED
    except Exception as error:
        reason = reason_of(error, view.folder, writing)
        if reason is not None:
            view.fail(str(reason))
            is_input = isinstance(reason, errors.ConfigError | errors.DataError)
            lasts = is_input and not passes(reason)
            code = errors.EXIT_BAD_INPUT if lasts else errors.EXIT_FAILED
        elif hanging():
            view.end()
            traceback.print_exc()
            code = errors.EXIT_FAILED
        else:
            raise
    finally:
        view.close()
        logging.captureWarnings(False)
    if stuck := hanging():  # threads that the interpreter would wait for at its exit
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"ended without {', '.join(map(str, stuck))}\n")
            sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def without_deepspeed() -> Iterator[None]:
    """Inside, DeepSpeed logs only errors: transformers imports it, and without a GPU it prints
    warnings on standard output."""
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
) -> errors.AgentEnvError | OSError | None:
    """The error with the text for users; None for a bug. `folder` is that of the run; `writing`
    names the activity in an I/O error that names no file."""
    if isinstance(error, ModuleNotFoundError):
        return errors.MissingError(needs_train(error.name)) if error.name in TRAIN else None
    reason = first_reason(error)
    if not isinstance(reason, OSError):
        return reason
    name = written(reason)
    inside = folder is not None and folder in Path(str(name)).parents
    key = DIR_KEY if inside else ""
    return OSError(f"{name or writing}: {explain(reason, key)}")


SHOWN_S = 2.0  # age of a thread's work from which an interruption names it


def run_until_done(work: Coroutine[Any, Any, T], view: View) -> T:
    """Run the work of a command. The first Ctrl-C, SIGTERM or SIGHUP cancels the work, which may
    save before it ends; then this raises KeyboardInterrupt. A second signal prints the work that
    the end waits for, and a third ends the process (see Watchdog). `view` reports code that blocks
    the event loop.
    """
    runner = asyncio.Runner(loop_factory=CommandLoop)
    loop = runner.get_loop()
    watchdog = Watchdog(loop, view.warn_at_once)
    num_signals = 0

    def stop(task: asyncio.Task[Any]) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            task.cancel()  # once: a second one would interrupt the clean-up
        first = "interrupted" if num_signals == 1 else "still shutting down"
        jobs = ", ".join(map(str, running(SHOWN_S)))
        waits = [view.activity and f"waiting for {view.activity}", view.longest_wait(), jobs]
        what = "; ".join(filter(None, [first, *waits]))
        view.log(f"{what} (a third signal within {GRACE_S:g} s ends the command at once)")

    async def main() -> T:
        watchdog.claim_signals()
        this = asyncio.current_task()
        assert this is not None

        def on_signal(*_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: the command has ended
                loop.call_soon_threadsafe(stop, this)

        for number in handled:
            signal.signal(number, on_signal)
        return await work

    raise_file_limit()
    share_heap()
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    handled = [number for number in ENDING if not (is_detached and number == signal.SIGHUP)]
    before = [signal.getsignal(number) for number in handled]
    try:
        with watchdog.watch(), runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


MAX_FILES = 65536


def allowed_files() -> int:
    """The number of files and connections that a command may open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)


def raise_file_limit() -> None:
    """Raise the soft limit of open files of this process and its children to the hard limit, at
    most MAX_FILES. Each running request is a connection; the usual default is 1024."""
    (soft, hard), wanted = resource.getrlimit(resource.RLIMIT_NOFILE), allowed_files()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def first_reason(error: BaseException) -> errors.AgentEnvError | OSError | None:
    """The first error with a reason for the user; None if one of the errors is a bug."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, errors.AgentEnvError | OSError) else None
    reasons = [first_reason(part) for part in error.exceptions]
    return None if None in reasons else reasons[0]
