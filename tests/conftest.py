"""The common setup of all tests; their marks are in pyproject.toml."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from agentenv.envs.quickstart.setup import build_model
from tests.support import cpu_times, forkserver

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


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the quick start; nothing is written into it."""
    build_model(folder := tmp_path_factory.mktemp("built"), seed=0)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeats",
        type=int,
        default=1,
        help="how many times as often as usual tests with a random moment try it",
    )
    parser.addoption(
        "--golden",
        action="store_true",
        help="write what commands print into tests/golden/ instead of comparing it",
    )
    parser.addoption(
        "--cpu-times",
        action="store_true",
        help="write what the tests took into tests/cpu_times.txt",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_times.CpuTimes(config))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with real servers first, then those with the dearest tests, so that workers end
    together."""
    cpu_times.mark_heavy(items)
    seconds = defaultdict[Path, float](float)
    for name, value in cpu_times.read().items():
        seconds[config.rootpath / name.partition("::")[0]] += value
    items.sort(key=lambda item: (not has_server(item.path), -seconds[item.path]))


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


_kept: list[dict[object, object]] = []


@pytest.fixture(autouse=True, scope="module")
def _nothing_shared() -> Iterator[None]:
    """The order of modules changes nothing: none sees the shared resources of the one before, which
    count in the metrics of a run, or its classes among the names of parts."""
    yield
    if secrets := sys.modules.get("agentenv.base.secrets"):
        secrets.SECRETS.__init__()
    if registry := sys.modules.get("agentenv.base.registry"):
        for key in registry.PartKey.__subclasses__():
            known = key.registry._loaded
            for name in [name for name in known if ":" in name]:
                del known[name]
    if env := sys.modules.get("agentenv.contract.env"):
        _kept.append(dict(env._resources))  # they end with the process, as they did in use
        env.forget_shared()


@pytest.fixture
async def services() -> AsyncIterator[None]:
    """Services that a test shares are closed at its end."""
    from agentenv.contract.env import close_shared

    yield
    await close_shared()


@pytest.fixture
def without_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre that is mounted without them."""

    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)


@pytest.fixture
def no_env_left_open() -> Iterator[None]:
    from tests.support.toy import CountingEnv

    CountingEnv.num_open = 0
    yield
    assert CountingEnv.num_open == 0


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks that learners of this module start are forks; see `tests.support.forks`."""
    from tests.support import forks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.processes.supervisor.start_process", forks.start_process)
        yield


@pytest.fixture(scope="session")
def repeats(request: pytest.FixtureRequest) -> int:
    """Factor on the number of random moments that a test tries."""
    return int(request.config.option.repeats)
