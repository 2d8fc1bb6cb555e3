"""Virtual environments of peers, each made on first use from the file that pins it.

A folder of them is by default that of the user's caches. An environment is named by its peer and by
the requirements, so that another file makes another one. What pip refuses leaves why in the file
`error.txt` and is not tried again while that stands; a lack of time, of the network or of room on
the disk says nothing about a peer and is not kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentenv.disk import locked
from agentenv.errors import AgentEnvError

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
BAR = "\u2501"  # what pip draws its progress with
ERROR, MADE, LOG = "error.txt", "made", "install.log"
LOOK_S = 30.0  # for a Python that is on the path to do nothing
POLL_S = 0.2  # between looks at an environment that another bench makes
# What pip's log has, in small letters, where the network or the disk was the trouble.
OURS = (
    *("connection broken", "connectionpool", "connection error", "timed out", "name resolution"),
    *("http error 5", "no space left"),
)


class PeerError(AgentEnvError):
    """A peer that was not made or did not run: the last line of what it said."""


class RefusedError(PeerError):
    """One that pip does not install, here and later."""


def default_folder() -> Path:
    """Default folder of environments."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "agentenv" / "peers"


def interpreter(
    name: str, requirements: Path, versions: Sequence[str], folder: Path, limit_s: float
) -> Path:
    """The Python of the environment, which is created if missing: one of `versions`, the
    first that is found. Raises PeerError."""
    text = "\n".join([requirements.read_text(encoding="utf-8"), *versions])
    place = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    python = place / "bin" / "python"
    with _held(place, limit_s):
        if (place / MADE).is_file() and python.exists():
            return python
        if not (place / ERROR).is_file():
            shutil.rmtree(place, ignore_errors=True)  # of a bench that was interrupted
            place.mkdir()
            try:
                _make(place, python, requirements, versions, limit_s)
                (place / MADE).touch()
                return python
            except PeerError as error:
                shutil.rmtree(place / "lib", ignore_errors=True)  # often gigabytes
                if not isinstance(error, RefusedError):
                    raise
                tried = time.strftime("%Y-%m-%d")
                (place / ERROR).write_text(f"{error} (tried {tried})", encoding="utf-8")
        why = (place / ERROR).read_text(encoding="utf-8")
    raise RefusedError(f"{why}; remove {place} to try again")


@contextmanager
def _held(place: Path, limit_s: float) -> Iterator[None]:
    """No other bench makes or removes the environment meanwhile. Raises PeerError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f"{place.name}.lock")
    lock.touch()
    end = time.monotonic() + limit_s
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(lock, fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise PeerError(
                        f"another bench has it, in {place}, for over {limit_s:g} s; let that end"
                    ) from None
                time.sleep(POLL_S)
        yield


def _make(
    place: Path, python: Path, requirements: Path, versions: Sequence[str], limit_s: float
) -> None:
    """Raises RefusedError for what pip does not install, PeerError for what is no fault of it."""
    base = _base(versions)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    commands = ([base, "-m", "venv", str(place)], [*pip, "-r", str(requirements)])
    end = time.monotonic() + limit_s
    with (place / LOG).open("w", encoding="utf-8") as log:
        for command in commands:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=log, timeout=max(1.0, end - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                raise PeerError(
                    f"not installed within {limit_s:g} s; pip was at: {last_line(place / LOG)}"
                ) from None
            except OSError as error:
                raise PeerError(str(error)) from None
            if done.returncode:
                said = (place / LOG).read_text(encoding="utf-8", errors="replace").lower()
                is_ours = command[0] == base or done.returncode < 0  # it was killed
                is_ours = is_ours or any(sign in said for sign in OURS)
                raise (PeerError if is_ours else RefusedError)(last_line(place / LOG))


def _base(versions: Sequence[str]) -> str:
    """The Python that is running if it is one of `versions`, or one of the path."""
    if "{}.{}".format(*sys.version_info) in versions:
        return sys.executable
    for version in versions:
        found = shutil.which(f"python{version}")
        if found is not None and _runs(found):
            return found
    raise PeerError(f"needs Python {' or '.join(versions)}, and none is on the path")


def _runs(python: str) -> bool:
    """Whether it is one: version managers put scripts on the path for what is not chosen."""
    try:
        done = subprocess.run([python, "-c", ""], capture_output=True, timeout=LOOK_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not done.returncode


def last_line(log: Path | str) -> str:
    """The last error line, or the last line, without terminal control sequences."""
    text = log.read_text(encoding="utf-8", errors="replace") if isinstance(log, Path) else log
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    lines = [line for line in lines if line and BAR not in line]
    errors = [line for line in lines if line.lower().startswith("error:") or "Error: " in line]
    line = (errors or lines or ["nothing was said"])[-1]
    return "".join(sign for sign in line if sign.isprintable())[:300]


def installed(python: Path, distribution: str) -> str:
    """The version of a package there, or "" if it has none."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, distribution], capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()
