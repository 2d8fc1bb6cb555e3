"""Sessions at a SandboxFusion service: a small one, on this machine, that the test starts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agentenv.envs.sandbox.remote import RemoteSandbox
from agentenv.errors import ConfigError, EnvError, InfraError


class Service:
    """Answers as SandboxFusion does; `fault` replaces the next answer."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fault: web.Response | None = None

    async def run_code(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        fault, self.fault = self.fault, None
        if fault is not None:
            return fault
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-c",
            body["code"],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(body["run_timeout"]):
                out, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()
            outcome = {"status": "TimeLimitExceeded", "execution_time": body["run_timeout"]}
            return web.json_response({"status": "Failed", "message": "", "run_result": outcome})
        outcome = {
            "status": "Finished",
            "execution_time": 0.05,
            "return_code": process.returncode,
            "stdout": out.decode(),
            "stderr": errors.decode(),
        }
        status = "Failed" if process.returncode else "Success"
        reply = {"status": status, "message": "", "compile_result": None, "run_result": outcome}
        return web.json_response({**reply, "executor_pod_name": None, "files": {}})


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    one = Service()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/run_code", one.run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield one, f"http://{host}:{port}/"
    await runner.cleanup()


@pytest.fixture
async def sandbox(service: tuple[Service, str]) -> AsyncIterator[RemoteSandbox]:
    one = RemoteSandbox(service[1])
    yield one
    await one.close()
    await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_session_holds_its_variables_and_so_does_its_fork(
    sandbox: RemoteSandbox, service: tuple[Service, str]
) -> None:
    await sandbox.start()
    parent = sandbox.session(7)
    first = await parent.run("import random; x = [random.random()]; x", 10)
    assert (first.ok, first.end) == (True, "done")
    failed = await parent.run("print('\\n!')\n1 / 0", 10)
    assert failed.end == "raised"
    assert "ZeroDivisionError: division by zero" in failed.output
    child = await parent.fork()
    await parent.run("x.append(0)", 10)
    assert (await child.run("x", 10)).output == first.output
    assert (await parent.run("len(x)", 10)).output == "2"
    assert sandbox.counters.num_replays == 5  # three of the parent, the fork's and its call's
    sent = service[0].requests[0]
    assert (sent["language"], sent["memory_limit_MB"], sent["stdin"]) == ("python", 512, "")
    parent.close()
    with pytest.raises(EnvError, match="closed"):
        await parent.run("1", 10)
    child.close()


@pytest.mark.slow
async def test_what_a_cell_does_to_itself(sandbox: RemoteSandbox) -> None:
    session = sandbox.session(1)
    await session.run("x = 5", 10)
    assert (await session.run("import os; os._exit(1)", 10)).end == "died"
    late = await session.run("while True: pass", 0.5)
    assert (late.output, late.end) == ("TimeoutError: stopped after 0.5 s", "timed_out")
    assert (await session.run("x", 10)).output == "5"  # only cells that ended are run again


@pytest.mark.slow
async def test_a_replay_that_differs_is_refused(sandbox: RemoteSandbox) -> None:
    for code in ("import time; time.time_ns()", "import time; x = time.time_ns()"):
        session = sandbox.session(1)
        await session.run(code, 10)
        with pytest.raises(EnvError, match=r"cells said something else than the first time, or"):
            await session.fork()
        assert (await session.run("6 * 7", 10)).output == "42"  # what is no fork goes on
    assert sandbox.counters.num_replays_refused == 2


@pytest.mark.slow
async def test_what_cannot_be_repeated_is_asked_only_of_a_fork(sandbox: RemoteSandbox) -> None:
    session = sandbox.session(1)
    for code in ("import time; time.time_ns()", "object()", "import os; os.getpid()"):
        assert (await session.run(code, 10)).ok
    assert (await session.run("6 * 7", 10)).output == "42"


@pytest.mark.slow
async def test_sets_and_entropy_are_the_same_in_every_call(sandbox: RemoteSandbox) -> None:
    session = sandbox.session(1)
    code = "import os, random, uuid; x = set('abcdefghij'), os.urandom(4), uuid.uuid4(); x"
    first = (await session.run(code, 10)).output
    assert (await session.run("x", 10)).output == first
    child = await session.fork()
    assert (await child.run("x", 10)).output == first
    assert (await child.run("import sys; input()", 10)).output.endswith("reading a line")
    assert (await sandbox.session(2).run(code, 10)).output != first


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"status": 504}, "HTTP status 504"),
        ({"text": "<html>"}, "not a reply of SandboxFusion"),
        ({"text": '{"status": "SandboxError", "message": "no pod"}'}, "SandboxError: no pod"),
        ({"body": b"x" * (5 << 20)}, "a reply over"),
    ],
)
async def test_a_service_in_trouble_is_no_result(
    sandbox: RemoteSandbox, service: tuple[Service, str], fault: dict[str, Any], problem: str
) -> None:
    session = sandbox.session(1)
    service[0].fault = web.Response(**fault)
    with pytest.raises(InfraError, match=problem):
        await session.run("1", 10)
    assert (await session.run("1 + 1", 10)).output == "2"


async def test_a_service_that_is_none() -> None:
    sandbox = RemoteSandbox("http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"python\.remote_url: http://127\.0\.0\.1:9 does not work"
    ):
        await sandbox.start()
    await sandbox.close()
    with pytest.raises(ConfigError, match=r"expected http://"):
        RemoteSandbox("localhost:8080")
