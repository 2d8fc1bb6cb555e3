"""The common setup of all tests, and the cost of each: pytest --cpu-times FILE."""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import forkserver

# Threads that wait by spinning take the processors from the other worker of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("short", max_examples=50, deadline=None)  # time is meaningless here
settings.register_profile("long", max_examples=2000, deadline=None)  # of make long
settings.load_profile("short")

# In the background of a script SIGINT is ignored, below nohup SIGHUP, by commands that tests start
# too; like this they get them as they do in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeats",
        type=int,
        default=1,
        help="how many times as often as usual tests with a random moment try it",
    )
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        type=Path,
        help="write the CPU seconds of each file and test with the processes it started, the "
        "dearest first; unlike --durations they are about the same on a busy machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cpu_times:
        config.pluginmanager.register(CpuTimes(config.option.cpu_times))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with real servers first, then other long ones, so that workers end together."""
    marks = defaultdict(set)
    for item in items:
        marks[item.path] |= {mark.name for mark in item.iter_markers()}

    def place(item: pytest.Item) -> int:
        names = marks[item.path]
        return 0 if names & {"engine_vllm", "engine_sglang"} else 1 if "slow" in names else 2

    items.sort(key=place)


class Files(LoadScopeScheduling):
    """A file goes to one worker as a whole, and those with real servers go to the same one: the
    fork servers of these servers import for 20 CPU seconds."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "engines" if has_server(self.config.rootpath / file) else file


@cache
def has_server(file: Path) -> bool:
    return "pytest.mark.engine_" in file.read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    config.option.loadscopereorder = False  # it would put files of few tests, the longest, last
    return Files(config, log)


def pytest_sessionfinish() -> None:
    forkserver.close_all()


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks that learners of this module start are forks; see `tests.support.forks`."""
    from tests.support import forks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.supervisor.start_process", forks.start_process)
        yield


@pytest.fixture(scope="session")
def repeats(request: pytest.FixtureRequest) -> int:
    """Factor on the number of random moments that a test tries."""
    return int(request.config.option.repeats)


class CpuTimes:
    """Adds up user and system time; a process counts where it ended and was waited for, by a
    fork server too."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: Counter[str] = Counter()
        self.before = cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        now = cpu_seconds()
        report.cpu_s, self.before = now - self.before, now  # pytest-xdist hands it on
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # of pytest-xdist: the controller writes
            return
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]] += seconds
        blocks = [{"all": files.total()}.items(), files.most_common(), self.seconds.most_common()]
        lines = [f"{seconds:8.1f}  {name}" for block in blocks for name, seconds in block]
        self.file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + forkserver.cpu_seconds()
