"""Virtual environments of peers. Each is created on first use from the file that pins its packages.

By default they are in the user's cache folder. An environment's name has the peer's name and a hash
of the requirements, so changed requirements create a new environment. If pip refuses a peer, the
file `error.txt` keeps the reason, and the installation is not tried again while the file exists. A
timeout, a network error or a full disk is not the peer's fault and is not kept.
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

from agentenv.base.disk import locked
from agentenv.base.errors import AgentEnvError

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
BAR = "\u2501"  # what pip draws its progress with
ERROR, MADE, LOG = "error.txt", "made", "install.log"
PROBE_S = 30.0  # limit for a Python on the PATH to run an empty program
POLL_S = 0.2  # between checks of an environment that another benchmark creates
# Lower-case texts in pip's log that show a problem of the network or the disk.
OURS = (
    "connection broken", "connectionpool", "connection error", "timed out", "name resolution",
    "http error 5", "no space left",
)  # fmt: skip


class PeerError(AgentEnvError):
    """A peer that was not installed or did not run, with the last line of its output."""


class RefusedError(PeerError):
    """A peer that pip refuses to install. It will not be tried again."""


def default_folder() -> Path:
    """Return the default folder of the environments."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "agentenv" / "peers"


def interpreter(
    name: str, requirements: Path, versions: Sequence[str], folder: Path, limit_s: float
) -> Path:
    """Return the Python of the environment, which is created if missing with the first of
    `versions` found. Raises PeerError."""
    text = "\n".join([requirements.read_text(encoding="utf-8"), *versions])
    place = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    python = place / "bin" / "python"
    with _held(place, limit_s):
        if (place / MADE).is_file() and python.exists():
            return python
        if not (place / ERROR).is_file():
            shutil.rmtree(place, ignore_errors=True)  # left by an interrupted benchmark
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
    """Lock the environment against other benchmarks. Raises PeerError after `limit_s` seconds."""
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
                        f"another benchmark has locked {place} for over {limit_s:g} s; wait for it"
                    ) from None
                time.sleep(POLL_S)
        yield


def _make(
    place: Path, python: Path, requirements: Path, versions: Sequence[str], limit_s: float
) -> None:
    """Create the environment. Raises RefusedError if pip refuses it, PeerError for other causes."""
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
                    f"not installed within {limit_s:g} s; last line: {last_line(place / LOG)}"
                ) from None
            except OSError as error:
                raise PeerError(str(error)) from None
            if done.returncode:
                output = (place / LOG).read_text(encoding="utf-8", errors="replace").lower()
                is_ours = command[0] == base or done.returncode < 0  # it was killed
                is_ours = is_ours or any(sign in output for sign in OURS)
                raise (PeerError if is_ours else RefusedError)(last_line(place / LOG))


def _base(versions: Sequence[str]) -> str:
    """Return the running Python if it is one of `versions`, or else one on the PATH."""
    if "{}.{}".format(*sys.version_info) in versions:
        return sys.executable
    for version in versions:
        found = shutil.which(f"python{version}")
        if found is not None and _runs(found):
            return found
    raise PeerError(f"needs Python {' or '.join(versions)}, which is not on the PATH")


def _runs(python: str) -> bool:
    """Return whether it runs: version managers put scripts of inactive versions on the PATH."""
    try:
        done = subprocess.run([python, "-c", ""], capture_output=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return not done.returncode


def last_line(log: Path | str) -> str:
    """Return the last error line, or the last line, without terminal control sequences."""
    text = log.read_text(encoding="utf-8", errors="replace") if isinstance(log, Path) else log
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    lines = [line for line in lines if line and BAR not in line]
    errors = [line for line in lines if line.lower().startswith("error:") or "Error: " in line]
    line = (errors or lines or ["no output"])[-1]
    return "".join(sign for sign in line if sign.isprintable())[:300]


def installed(python: Path, distribution: str) -> str:
    """Return the version of a package in the environment, or "" if it is missing."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, distribution], capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()
