"""A fork has the variables of its parent, or is refused; on each rung."""

from __future__ import annotations

import asyncio
import errno
import platform
import shutil
from pathlib import Path

import pytest

from agentenv.base.errors import EnvError
from agentenv.envs.sandbox import launch
from agentenv.envs.sandbox.confine import FORK_BESIDE, FORK_INTO_NAMESPACES
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.launch import HUGE_PAGES, environment
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from tests.support.polling import until
from tests.support.sandboxes import output_of, process_of, zygote_of

CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]

# Cells without output that set `x`: a replay can differ only in variables and files.
EQUAL = {
    "global generator": "import random; x = random.random()",
    "unseeded generator": "import random; x = random.Random().random()",
    "numpy's global generator": "import numpy as np; x = np.random.rand(3).tolist()",
    "numpy's new generator": "import numpy as np; x = np.random.default_rng().random(3).tolist()",
    "numpy's old generator": "import numpy as np; x = np.random.RandomState().rand()",
    "secrets": "import secrets; x = secrets.token_hex(8)",
    "uuid4": "import uuid; x = uuid.uuid4()",
    "system's generator": "import random; x = random.SystemRandom().random()",
    "system's entropy": "import os; x = os.urandom(8), os.getrandom(8)",
    "set of strings": "x = list(set('the quick brown fox'.split()))",
    "hash": "x = hash('text')",
    "shuffled": "import random; x = list(range(20)); random.shuffle(x)",
    "generator half way": "x = (i * i for i in range(9)); drawn = next(x)",
    "closure": "def make():\n  n = 0\n  def f():\n    nonlocal n\n    n += 1\n    return n\n"
    "  return f\nx = make(); drawn = x()",
    "class with state": "class A:\n  made = 0\nA.made += 1\nx = A()",
}
CLOCKS = {
    "time": "import time; x = time.time_ns()",
    "date": "import datetime; x = datetime.datetime.now()",
    "until the time is up": "import time\nx, end = 0, time.perf_counter_ns() + 1_000_001\n"
    "while time.perf_counter_ns() < end: x += 1",
    "random device": "x = open('/dev/urandom', 'rb').read(8)",
    "closure over the time": "import time\ndef make(t): return lambda: t\nx = make(time.time_ns())",
}
FILES = {
    "time of a file": "import os, time; time.sleep(0.02)  # times of files have steps\n"
    "open('f', 'w').close(); x = os.stat('f').st_mtime_ns",
    "content of a file": "import time\nwith open('f', 'w') as f: f.write(str(time.time_ns()))",
    "name of a file": "import tempfile; x = tempfile.mkdtemp()",
}


@pytest.fixture
def sandbox(on_each_rung: Sandbox) -> Sandbox:
    return on_each_rung


@pytest.fixture
async def replaying(sandbox: Sandbox) -> Sandbox:
    """A sandbox that cannot copy processes."""
    (await sandbox.start()).live_forks = False
    return sandbox


async def two(sandbox: Sandbox, code: str) -> tuple[SandboxSession, SandboxSession]:
    parent = sandbox.session(7)
    result = await parent.run(code, 20)
    assert result.output == "", result.output
    return parent, await parent.fork()


SAME = "repr(x()) if callable(x) else repr(list(x)) if hasattr(x, '__next__') else repr(x)"


async def test_a_replay_of_common_code_leaves_equal_variables(replaying: Sandbox) -> None:
    sandbox = replaying
    for name, code in EQUAL.items():
        parent, child = await two(sandbox, code)
        show = "x.made" if name == "class with state" else SAME
        assert await output_of(parent, show) == await output_of(child, show), name
        parent.close()
        child.close()
    counters = sandbox.counters
    assert (counters.num_replays, counters.num_replays_refused) == (len(EQUAL), 0)


async def test_a_replay_with_other_variables_or_files_is_refused(replaying: Sandbox) -> None:
    """Also if its output is the same."""
    sandbox = replaying
    differing = CLOCKS | (FILES if sandbox.rung == "namespaces" else {})
    differing.pop("name of a file", None)
    for number, (name, code) in enumerate(differing.items(), 1):
        parent = sandbox.session(7)
        assert (await parent.run(code, 10)).output == "", name
        with pytest.raises(EnvError, match="variables or files"):
            await parent.fork()
        assert sandbox.counters.num_replays_refused == number, name
        assert await output_of(parent, "1") == "1"
        parent.close()


async def test_a_replay_with_another_output_is_refused(replaying: Sandbox) -> None:
    parent = replaying.session(7)
    assert (await parent.run("import time; print(time.time_ns())", 10)).ok
    with pytest.raises(EnvError, match="a cell printed"):
        await parent.fork()
    assert replaying.counters.num_replays_refused == 1


async def test_sessions_of_one_seed_draw_the_same_entropy(sandbox: Sandbox) -> None:
    drawn = "import os, random, uuid; os.urandom(4), random.Random().random(), uuid.uuid4()"
    one, two_, other = sandbox.session(5), sandbox.session(5), sandbox.session(6)
    first = await output_of(one, drawn)
    assert first == await output_of(two_, drawn)
    assert first != await output_of(other, drawn)


async def test_a_copied_process_has_equal_variables_and_random_state(sandbox: Sandbox) -> None:
    idioms = EQUAL | CLOCKS
    for name, code in idioms.items():
        if name == "random device":
            continue  # leaves a file open, until it is collected
        parent, child = await two(sandbox, code)
        show = "x.made" if name == "class with state" else SAME
        assert await output_of(parent, show) == await output_of(child, show), name
        drawn = "import os, random; os.urandom(4), random.random(), random.Random().random()"
        assert await output_of(parent, drawn) == await output_of(child, drawn), name
        parent.close()
        child.close()
    assert (sandbox.counters.num_replays, sandbox.counters.num_replays_refused) == (0, 0)
    assert sandbox.counters.num_live_forks == len(idioms) - 1


async def test_copies_are_independent(sandbox: Sandbox) -> None:
    parent = sandbox.session(1)
    await parent.run("x = [0]", 10)
    child = await parent.fork()
    grandchild, sister = await asyncio.gather(child.fork(), parent.fork())
    family = [parent, child, grandchild, sister]
    await asyncio.gather(*(one.run(f"x.append({n})", 10) for n, one in enumerate(family)))
    assert [await output_of(one, "x") for one in family] == ["[0, 0]", "[0, 1]", "[0, 2]", "[0, 3]"]
    assert len({await output_of(one, "import os; os.getpid()") for one in family}) == 4
    assert (await parent.run("os._exit(1)", 10)).end == "died"
    child.close()
    for one in (grandchild, sister):
        assert await output_of(one, "len(x)") == "2"
        assert (await one.run("while True: pass", 0.2)).end == "timed_out"
    assert sandbox.counters.num_live_forks == 3
    for one in family:
        one.close()
    await until(lambda: len(zygote_of(sandbox).children()) <= 1)  # the initializer of forks, if any


def offers_huge_pages() -> bool:
    enabled = HUGE_PAGES / "enabled"
    return "GLIBC_TUNABLES" in environment() and "[never]" not in enabled.read_text()


def huge_kb(pid: int) -> int:
    rollup = Path("/proc", str(pid), "smaps_rollup").read_text()
    return int(rollup.partition("AnonHugePages:")[2].split()[0])


async def test_memory_is_in_huge_pages_where_available(sandbox: Sandbox) -> None:
    """Otherwise a fork copies an entry for each 4 kB."""
    if not offers_huge_pages():
        pytest.skip("this machine offers no huge pages")
    session = sandbox.session(1)
    assert (await session.run("x = [bytes(2000) for _ in range(8_000)]", 10)).ok
    assert huge_kb(process_of(session).pid) >= 2 << 10
    assert await output_of(session, "import os; 'GLIBC_TUNABLES' in os.environ") == "False"


async def test_a_fork_has_its_own_copy_of_the_files(sandbox: Sandbox) -> None:
    await sandbox.start()
    if sandbox.rung != "namespaces":
        pytest.skip("there, sessions cannot write files")
    parent = sandbox.session(1)
    code = """
import os
os.makedirs("a/b")
open("a/b/file", "w").write("one" * 1000)
os.chmod("a/b/file", 0o640)
os.utime("a/b/file", ns=(7, 8))
os.symlink("a/b/file", "link")
os.symlink("/nowhere", "dangling")
os.chdir("a")
"""
    await parent.run(code, 10)
    child = await parent.fork()
    look = (
        "s = os.stat('b/file'); oct(s.st_mode), s.st_mtime_ns, s.st_size, os.getcwd(), "
        "os.readlink('/tmp/link'), os.readlink('/tmp/dangling'), open('/tmp/link').read(6)"
    )
    assert await output_of(parent, look) == await output_of(child, look)
    await child.run("open('/tmp/link', 'w').write('two')", 10)
    await child.run("os.remove('/tmp/dangling'); open('mine', 'w').close()", 10)
    await parent.run("open('b/new', 'w').close()", 10)
    shown = await output_of(parent, "open('/tmp/link').read(6), os.listdir('.')")
    assert shown == "('oneone', ['b'])"
    assert await output_of(parent, "os.listdir('b')") != await output_of(child, "os.listdir('b')")
    assert sandbox.counters.num_live_forks == 1


async def test_forks_can_be_forked(sandbox: Sandbox) -> None:
    """Namespaces can be nested 32 deep; beyond, the record is replayed."""
    line = [sandbox.session(1)]
    await line[0].run("x = []", 10)
    for number in range(36):
        line.append(await line[-1].fork())
        await line[-1].run(f"x.append({number})", 10)
    assert await output_of(line[-1], "x") == str(list(range(36)))
    assert await output_of(line[0], "x") == "[]"
    counters = sandbox.counters
    assert counters.num_live_forks + counters.num_replays == 36
    assert counters.num_live_forks > 25


async def test_a_session_without_an_initializer_is_replayed(sandbox: Sandbox) -> None:
    await sandbox.start()
    if sandbox.rung != "namespaces":
        pytest.skip("there, nothing is to be copied")
    for one in zygote_of(sandbox).children(recursive=True):
        one.kill()
    _, child = await two(sandbox, "x = 3")
    assert await output_of(child, "x") == "3"
    assert (sandbox.counters.num_live_forks, sandbox.counters.num_replays) == (0, 1)


SHARED = {
    "open file": "f = open('/dev/null')",
    "pipe": "import os; f = os.pipe()",
    "memory": "import mmap; f = mmap.mmap(-1, 4096); f.write(b'x')",
    "descriptor": "import os; os.dup2(3, 9)",
    "standard output": "import os; os.dup2(os.pipe()[1], 1)",
}


@pytest.mark.parametrize("name", SHARED)
async def test_a_session_with_shared_resources_is_replayed(sandbox: Sandbox, name: str) -> None:
    parent = sandbox.session(1)
    await parent.run(SHARED[name] + "\nx = 7", 10)
    child = await parent.fork()  # by running it again
    assert await output_of(child, "x") == "7"
    assert (sandbox.counters.num_live_forks, sandbox.counters.num_replays) == (0, 1)
    assert await output_of(parent, "x") == "7"


MOST_FORKS = 200


async def run_beside_forks(sandbox: Sandbox, code: str) -> tuple[str, list[SandboxSession]]:
    """The output of a cell, and the forks of another session and of its own meanwhile and then."""
    session, other = sandbox.session(1), sandbox.session(2)
    await other.run("x = 1", 10)
    running = asyncio.ensure_future(session.run(code, 120))
    forks = [session, other]
    while not running.done():
        if len(forks) < MOST_FORKS:
            forks.append(await other.fork())
        else:  # the machine is so busy that the cell gets little of it
            await asyncio.wait([running])
    forks.append(await session.fork())
    counters = sandbox.counters  # a fork that waits for two seconds is a replay
    assert counters.num_live_forks + counters.num_replays == len(forks) - 2
    assert counters.num_live_forks >= 2
    return (await running).output, forks


async def test_a_cell_cannot_fork_without_the_host(sandbox: Sandbox) -> None:
    """The clone of a fork is refused to a cell, also while the host forks other sessions."""
    await sandbox.start()
    flags = FORK_INTO_NAMESPACES if sandbox.rung == "namespaces" else FORK_BESIDE
    code = f"""
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
made, end = 0, time.process_time() + 0.5
while time.process_time() < end:
    pid = libc.syscall({CLONE}, ctypes.c_long({flags}), 0, 0, 0, 0)
    if pid == 0:
        libc._exit(0)
    made += pid > 0
made, ctypes.get_errno()
"""
    output, _ = await run_beside_forks(sandbox, code)
    assert output == f"(0, {errno.EAGAIN})"


async def test_a_cell_cannot_set_the_signal_of_its_parents_death(sandbox: Sandbox) -> None:
    """The prctl of a starting fork is refused to cells, also while the host forks other sessions,
    and in forks after their start."""
    await sandbox.start()
    code = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
granted, end = 0, time.process_time() + 0.5
while time.process_time() < end:
    granted += libc.prctl(1, 9, 0, 0, 0) == 0
granted, ctypes.get_errno()
"""
    output, sessions = await run_beside_forks(sandbox, code)
    refused = f"(0, {errno.EPERM})"
    assert output == refused
    assert (await sessions[-1].run(code, 120)).output == refused
    assert await output_of(sessions[2], "x") == "1"


async def test_a_session_that_forks_in_another_way_is_replayed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does with the one clone that it may make."""
    monkeypatch.setattr("agentenv.envs.sandbox.sandbox.FORK_TIMEOUT_S", 0.5)
    parent = sandbox.session(1)
    await parent.run("x = 5", 10)
    for answer in ("lambda flags: -1", "lambda flags: 1 << 20", "lambda flags: os._exit(1)"):
        await parent.run(f"import os, sys; sys.modules['confine'].fork_at_rest = {answer}", 10)
        hidden = "import gc\nfor one in gc.get_objects():\n  if type(one).__name__ == 'partial'"
        hidden += (
            f" and 'fork_at_rest' in repr(one): one.__setstate__(({answer}, one.args, {{}}, {{}}))"
        )
        await parent.run(hidden, 10)
        child = await parent.fork()
        assert await output_of(child, "x") == "5"
        child.close()
    assert await output_of(parent, "x") == "5"
    assert sandbox.counters.num_live_forks == 0


async def test_forks_are_replays_without_a_seccomp_listener(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session is then process 1 of its own namespace, or may signal its own number only."""
    await sandbox.start()
    inside = shutil.copytree(launch.HERE, tmp_path / "sandbox") / "zygote.py"
    asking = "listener = confine.install(machine, above, listen=True)"
    inside.write_text(inside.read_text().replace(asking, "raise OSError"))
    monkeypatch.setattr(launch, "HERE", inside.parent)
    other = Sandbox(PythonConfig(preload=()), rungs=(sandbox.rung or "landlock",))
    parent, child = await two(other, "import os; x = os.urandom(4)")
    assert await output_of(parent, "x") == await output_of(child, "x")
    assert (other.counters.num_live_forks, other.counters.num_replays) == (0, 1)
    if other.rung == "namespaces":
        assert await output_of(child, "os.getpid(), os.getppid()") == "(1, 0)"
    assert "not permitted" in await output_of(child, "os.kill(os.getppid() or 2, 0)")
    assert await output_of(child, "os.kill(os.getpid(), 0)") == ""
    await other.close()
