"""A fork has the variables of its parent, or is refused; on each rung."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentenv.errors import EnvError
from envs.sandbox import Sandbox, SandboxSession
from envs.sandbox.process import Rung
from tests.check_sandbox import RUNGS
from tests.support.sandboxes import said

# Cells that say nothing and leave `x`; what code does whose words never show a difference.
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
    "time of a file": "import os; open('f', 'w').close(); x = os.stat('f').st_mtime_ns",
    "content of a file": "import time\nwith open('f', 'w') as f: f.write(str(time.time_ns()))",
    "name of a file": "import tempfile; x = tempfile.mkdtemp()",
}


@pytest.fixture(params=RUNGS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    rung: Rung = request.param
    one = Sandbox(rungs=(rung,), preload=())
    yield one
    await one.close()


async def two(sandbox: Sandbox, code: str) -> tuple[SandboxSession, SandboxSession]:
    parent = sandbox.session(7)
    result = await parent.run(code, 20)
    assert result.output == "", result.output
    return parent, await parent.fork()


SAME = "repr(x()) if callable(x) else repr(list(x)) if hasattr(x, '__next__') else repr(x)"


async def test_an_idiom_leaves_equal_variables(sandbox: Sandbox) -> None:
    for name, code in EQUAL.items():
        parent, child = await two(sandbox, code)
        show = "x.made" if name == "class with state" else SAME
        assert await said(parent, show) == await said(child, show), name
        parent.close()
        child.close()
    assert sandbox.counters.num_replays_refused == 0


async def test_what_a_replay_cannot_repeat_is_refused(sandbox: Sandbox) -> None:
    """Also where its words are the same."""
    await sandbox.start()
    differing = CLOCKS | (FILES if sandbox.rung == "namespaces" else {})
    differing.pop("name of a file", None)
    for number, (name, code) in enumerate(differing.items(), 1):
        parent = sandbox.session(7)
        assert (await parent.run(code, 10)).output == "", name
        with pytest.raises(EnvError, match="its variables, or its files"):
            await parent.fork()
        assert sandbox.counters.num_replays_refused == number, name
        assert await said(parent, "1") == "1"
        parent.close()


async def test_sessions_of_one_seed_draw_the_same_entropy(sandbox: Sandbox) -> None:
    drawn = (
        "import os, random, secrets, uuid; os.urandom(4), random.Random().random(), uuid.uuid4()"
    )
    one, two_, other = sandbox.session(5), sandbox.session(5), sandbox.session(6)
    first = await said(one, drawn)
    assert first == await said(two_, drawn)
    assert first != await said(other, drawn)
    for session in (one, two_, other):
        session.close()
