"""Files, descriptors, processes and sockets of the host are out of reach of a session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from tests.support.sandboxes import output_of


async def test_files_and_processes_of_a_session_are_limited(session: SandboxSession) -> None:
    big = "f = open('big', 'wb', buffering=0)\nwhile f.write(b'x' * 10 ** 6): pass"
    output = await output_of(session, f"import signal; signal.signal(25, signal.SIG_IGN)\n{big}")
    assert "File too large" in output or "No space left" in output
    many = "n = 0\nwhile True:\n  n += 1\n  open(f'm{n}', 'wb').write(b'x' * 10 ** 6)"
    assert "No space left" in await output_of(session, many)
    assert "BlockingIOError" in await output_of(session, "import os; os.fork()")
    assert "start new thread" in await output_of(
        session, "import threading; threading.Thread(target=print).start()"
    )
    assert "many open files" in await output_of(session, "f = [open('f', 'w') for _ in range(99)]")


async def test_a_session_sees_only_its_own(sandbox: Sandbox) -> None:
    parts = Path(sys.prefix).parts  # of an interpreter below /tmp the first folder is mounted
    in_tmp = [parts[2]] if parts[:2] == ("/", "tmp") else []
    first, second = sandbox.session(1), sandbox.session(2)
    code = "import os; sorted(n for n in os.environ if 'NUM_THREADS' not in n)"
    names = await output_of(first, code)
    assert names == "['HOME', 'LC_CTYPE', 'PWD', 'PYTHONHASHSEED']"
    assert await output_of(first, "os.listdir('/proc'), os.listdir('/tmp')") == f"([], {in_tmp})"
    code = ["cells.py", "confine.py", "fork_broker.py", "process_table.py"]
    inside = [*code, "system_calls.toml", "zygote.py"]
    seen = await output_of(first, "sorted(os.listdir('/sandbox')), os.getppid(), os.getuid()")
    assert seen == f"({inside}, 1, 1000)"
    await first.run("open('/tmp/mine', 'w').write('secret')", 10)
    assert await output_of(second, "import os; os.listdir('/tmp')") == f"{in_tmp}"


async def test_no_descriptor_of_the_host_is_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.write_text("PWNED")
    with path.open() as file:
        os.set_inheritable(file.fileno(), True)
        session = sandbox.session(1)
        code = """
            import os
            found = []
            for fd in range(64):
                try:
                    found.append((fd, os.fstat(fd).st_mode >> 12))
                except OSError:
                    pass
            found
        """
        code = "\n".join(line[12:] for line in code.splitlines())
        assert await output_of(session, code) == "[(0, 2), (1, 2), (2, 2), (3, 12)]"  # null, socket
