"""The rungs of the sandbox: the first that works is taken, a lower one only with a warning."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError, InfraError
from agentenv.envs.sandbox import confine, launch
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.launch import Interpreter, advised
from agentenv.envs.sandbox.sandbox import Sandbox
from agentenv.lab.diagnosis.doctor import RUNGS
from tests.support.sandboxes import children, num_descriptors, output_of, until_processes


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


@pytest.fixture
def no_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "landlock_abi", lambda: 0)


async def test_namespaces_are_the_first_rung(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(PythonConfig(preload=()))
    await sandbox.start()
    assert (sandbox.rung, caplog.text) == ("namespaces", "")
    await sandbox.close()


@pytest.mark.usefixtures("no_bubblewrap")
async def test_the_second_rung_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(PythonConfig(preload=()))
    session = sandbox.session(1)
    assert await output_of(session, "x = 6 * 7; x") == "42"
    assert sandbox.rung == "landlock"
    assert "'landlock', since: namespaces" in caplog.text
    assert "apt install bubblewrap" in caplog.text
    assert "files and threads" in caplog.text
    (record,) = caplog.records
    assert vars(record)["shown"], "on the terminal, too"
    fork = await session.fork()
    shown = await output_of(fork, "import fractions, wave, email.mime.text; x")  # not preloaded
    assert shown == "42"
    assert "ModuleNotFoundError" in await output_of(fork, "import no_such_module")
    assert "Read-only file system" in await output_of(fork, "open('f', 'w')")
    assert "start new thread" in await output_of(
        fork, "import threading; threading.Thread(target=print).start()"
    )
    session.close()
    fork.close()
    await until_processes(1)
    await sandbox.close()
    assert children() == []


@pytest.mark.usefixtures("no_bubblewrap", "no_landlock")
async def test_a_sandbox_without_any_rung_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        await Sandbox(PythonConfig(preload=())).start()
    text = str(caught.value)
    for part in ("apt install bubblewrap", "Linux 5.13", "allow_unsafe = true"):
        assert part in text


async def test_a_sandbox_without_namespaces_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2\nexit 1")
    bubblewrap.chmod(0o700)
    monkeypatch.setattr(shutil, "which", lambda _: str(bubblewrap))
    await asyncio.to_thread(int)
    before = num_descriptors()
    with pytest.raises(ConfigError, match=r"No permissions.*user namespaces"):
        await Sandbox(PythonConfig(preload=()), rungs=["namespaces"]).start()
    assert (num_descriptors(), children()) == (before, [])


async def test_a_sandbox_that_fails_its_self_test_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = launch.bubblewrap

    def with_a_hole(python: Interpreter) -> list[str]:
        program, *options = original(python)
        return [program, "--ro-bind", "/etc", "/etc", *options]

    monkeypatch.setattr(launch, "bubblewrap", with_a_hole)
    with pytest.raises(ConfigError, match="the host: /etc/"):
        await Sandbox(PythonConfig(preload=()), rungs=["namespaces"]).start()
    assert children() == []


@pytest.mark.usefixtures("no_bubblewrap", "no_landlock")
async def test_a_plain_subprocess_is_used_only_when_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sandbox = Sandbox(PythonConfig(allow_unsafe=True, preload=()))
    session = sandbox.session(1)
    assert await output_of(session, "x = 1; x") == "1"
    assert "WITHOUT a sandbox" in caplog.text
    assert sandbox.rung == "unsafe"
    home = Path((await output_of(session, "import os; os.getcwd()")).strip("'"))
    assert home.parts[1] == "tmp"
    assert (await session.run("while True: pass", 0.2)).end == "timed_out"
    assert (await output_of(session, "2")).endswith("2")
    zygote_process_id = sandbox._zygote._process.process.pid if sandbox._zygote else 0
    os.kill(zygote_process_id, signal.SIGKILL)
    await until_processes(1)  # the dead zygote, not waited for yet; its session died with it
    with pytest.raises(InfraError):
        await session.run("1", 10)
    assert (await output_of(session, "3")).endswith("3")
    await sandbox.close()
    assert children() == []
    assert home.parent.name.startswith("agentenv-sandbox-")
    assert not home.parent.exists(), "the zygote that was killed could not remove it"


async def test_numpy_and_sympy_are_available_and_seeded() -> None:
    sandbox = Sandbox()
    one, two, other = sandbox.session(5), sandbox.session(5), sandbox.session(6)
    code = "import sys; loaded = 'sympy' in sys.modules\nimport numpy, sympy\n"
    code += "loaded, numpy.random.rand(), sympy.integrate(sympy.Symbol('x'))"
    first = await output_of(one, code)
    assert first.startswith("(True, ")
    assert first.endswith(", x**2/2)")
    assert first == await output_of(two, code)
    assert first != await output_of(other, code)
    await sandbox.close()


async def test_a_missing_package_is_reported_at_the_start() -> None:
    sandbox = Sandbox(PythonConfig(preload=("json", "no_such_package")))
    with pytest.raises(ConfigError, match=r"python\.preload: .*no_such_package.*pip install"):
        await sandbox.start()
    sandbox = Sandbox(PythonConfig(preload=(), prelude="print(1)\nfrom json import nothing"))
    with pytest.raises(ConfigError, match=r"python\.prelude.*line 2, .*ImportError"):
        await sandbox.start()
    assert children() == []


def virtual_environment(folder: Path) -> Path:
    """An environment with a single module, only_here."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = os.path.realpath(sys.executable)
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(base).parent}\n")
    (packages / "only_here.py").write_text("answer = 42")
    return folder


async def test_the_interpreter_of_another_environment_is_used(tmp_path: Path) -> None:
    folder = virtual_environment(tmp_path / "venv")
    for rung in RUNGS:
        sandbox = Sandbox(
            PythonConfig(interpreter=str(folder), preload=("only_here",)), rungs=[rung]
        )
        session = sandbox.session(1)
        assert await output_of(session, "import sys, only_here; only_here.answer") == "42"
        assert folder.name in await output_of(session, "sys.prefix")
        assert "Read-only" in await output_of(session, "open(only_here.__file__, 'w')")
        await sandbox.close()


async def test_a_path_without_a_working_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python\.interpreter"):
        await Sandbox(PythonConfig(interpreter=str(tmp_path))).start()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text("#!/bin/sh\necho no")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="does not work"):
        await Sandbox(PythonConfig(interpreter=str(tmp_path))).start()


@pytest.mark.parametrize("namespace", ["user", "pid", "net", "ipc", "uts"])
def test_a_limit_of_namespaces_has_its_remedy(namespace: str) -> None:
    limit = f"echo 0 > /proc/sys/user/max_{namespace}_namespaces"
    start = f"{limit}; bwrap --unshare-user --unshare-{namespace} --ro-bind / / true"
    ended = subprocess.run(["unshare", "-Ur", "sh", "-c", start], capture_output=True, text=True)
    assert f"user.max_{namespace}_namespaces" in advised(ended.stderr)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [("EAGAIN", "ulimit -u"), ("ENOMEM", "memory"), ("EMFILE", "ulimit -n"), ("ENOSPC", "The disk"),
     ("EDQUOT", "The quota"), ("EFBIG", "ulimit -f")],
)  # fmt: skip
def test_each_limit_of_the_kernel_has_its_own_remedy(code: str, remedy: str) -> None:
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
    assert remedy in advised(f"a sandbox session did not start: {error}")


async def test_sessions_beyond_the_open_files_are_errors_with_the_remedy() -> None:
    sandbox = Sandbox(PythonConfig(preload=()))
    await sandbox.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] <= highest:  # no free number is left below the limit, but eight
        held.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 9, limits[1]))
    try:
        runs = [sandbox.session(number).run("1", 60) for number in range(24)]
        found = await asyncio.gather(*runs, return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in held:
            os.close(number)
        await sandbox.close()
    errors = [str(one) for one in found if isinstance(one, BaseException)]
    assert all("ulimit -n" in one for one in errors)
    assert 0 < sum("Errno" in one for one in errors) < len(errors)  # of sockets, and of processes


START = """
import asyncio
from agentenv.envs.sandbox.sandbox import PythonConfig, Sandbox
asyncio.run(Sandbox(PythonConfig(preload=())).start())
"""


@pytest.mark.parametrize(
    ("limit", "remedy"), [("-t 99", "ulimit -Ht"), ("-f 999", "ulimit -Hf"), ("-n 40", "-Hn")]
)
def test_a_hard_limit_below_that_of_a_session_has_its_remedy(limit: str, remedy: str) -> None:
    command = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable, "-c", START]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert remedy in ended.stderr
    assert "userns" not in ended.stderr
