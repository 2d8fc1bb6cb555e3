"""APIs over HTTP as tools: statuses, logins, one client for a loop, and its end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv import Message, Task, ToolEnv, demonstrate, tool
from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError, CrashError, InfraError, OutageError, ToolError
from agentenv.base.types import ToolCall
from agentenv.contract.env import close_shared
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.http import MAX_FORBIDDEN, MAX_LOGINS, HttpClient, meaning, status_error
from agentenv.envs.grading.reward import ExactMatch
from tests.support.snippets import ran

TASK = Task("t", "e", "q", ("7",))
Handler = Callable[[web.Request], Awaitable[web.Response]]
Serve = Callable[[Handler], Awaitable[str]]  # at an address


pytestmark = pytest.mark.usefixtures("services")


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app)
        servers.append(server)
        await server.start_server()
        return str(server.make_url("/v1/"))

    yield start
    for server in servers:
        await server.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, ToolError) for status in (302, 400, 403, 404, 405, 409, 410, 418, 422)),
        *((status, ConfigError) for status in (401, 402, 407)),
        *((status, InfraError) for status in (408, 425, 429, 500, 502, 503, 504, 529, 599)),
    ],
)
@pytest.mark.parametrize("body", ['{"error": "no such item"}', "no such item", ""])
async def test_the_error_of_each_status(status: int, kind: type, body: str, serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/v1/items/a"
        return web.Response(status=status, text=body, headers={"Retry-After": "3"})

    client = HttpClient(await serve(handler))
    with pytest.raises(kind) as caught:
        await client.get("/items/a")
    assert type(caught.value) is kind
    assert ("no such item" if body else f"HTTP {status}") in str(caught.value)
    assert getattr(caught.value, "retry_after_s", 0) == (3.0 if kind is InfraError else 0)


async def log_in(client: HttpClient) -> dict[str, str]:
    return {"Authorization": (await client.post("/login"))["token"]}


async def play(api: HttpClient, **keys: Any) -> str:
    """The observations of an API by a policy in an episode."""

    @tool
    async def order(number: int) -> str:
        """The status of an order."""
        return str((await api.get(f"/orders/{number}", key="query-secret"))["status"])

    env = ToolEnv(TASK, [order], ExactMatch(), num_retries=0, **keys)
    await env.reset()
    messages, *_ = await env.step(Message("assistant", "", (ToolCall("order", {"number": 3}),)))
    return messages[0].content


async def test_a_rejected_token_is_an_error_of_configuration_without_secrets(serve: Serve) -> None:
    """No policy reads it, for any request."""

    async def handler(request: web.Request) -> web.Response:
        token = request.headers["Authorization"]
        return web.json_response({"error": f"{token} has been revoked"}, status=401)

    client = HttpClient(await serve(handler), headers={"Authorization": "Bearer head-secret"})
    with pytest.raises(ConfigError) as caught:
        await play(client)
    said = str(caught.value)
    assert "'order': GET http://127.0.0.1" in said
    assert "/v1/orders/3: HTTP 401" in said
    assert "secret" not in said


async def test_a_403_is_an_observation_until_every_request_gets_it(serve: Serve) -> None:
    """One item may be forbidden; all of them are, where the key is not allowed anything."""

    async def handler(request: web.Request) -> web.Response:
        status = 200 if request.path.endswith("/open") else 403
        return web.json_response("not yours", status=status)

    client = HttpClient(await serve(handler))
    for _ in range(3):
        for _ in range(MAX_FORBIDDEN - 1):
            assert "not yours" in await play(client)
        await client.get("/open")
    for _ in range(MAX_FORBIDDEN - 1):
        await play(client)
    with pytest.raises(ConfigError, match=r"20.*403"):
        await play(client)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8098", "'127.0.0.1:8098'"),
        ("me:secret@host/v1?key=secret", "'host/v1'"),
        ("", "''"),
        (None, "'None'"),
        ("http://[", r"'http://\['"),
    ],
)
def test_a_url_without_a_scheme_is_refused_at_construction(url: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HttpClient(url)


async def test_a_client_is_prepared_once(serve: Serve) -> None:
    """Though tools are prepared before each episode."""
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    client = HttpClient(await serve(handler))
    for path in ("/a", "/b", "/a", "/b", ""):
        await client.prepare(path)
    assert asked == ["/v1/a", "/v1/b"]


@pytest.mark.parametrize("status", [404, 401, 0])
async def test_a_request_in_prepare_refuses_the_run_with_tool_and_address(
    status: int, serve: Serve
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status)

    client = HttpClient(await serve(handler) if status else "http://127.0.0.1:9")

    class Api(FunctionTool):
        async def prepare(self) -> None:
            await client.prepare("/health")

    with pytest.raises(ConfigError if status else InfraError) as caught:
        await ToolEnv(TASK, [Api(stock)], ExactMatch()).reset()
    assert "'stock'" in str(caught.value)
    assert (f"HTTP {status}" if status else "Connection refused") in str(caught.value)


async def test_responses_are_json_values_texts_or_none(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        match request.path.rpartition("/")[2]:
            case "json":
                said = await request.json() if request.can_read_body else dict(request.query)
                return web.json_response({"got": said, "team": request.headers.get("X-Team")})
            case "text":
                return web.Response(text="hé")
            case "broken":
                return web.Response(text="{", content_type="application/json")
            case "slow":
                await asyncio.sleep(30)
        return web.Response(status=204)

    client = HttpClient(await serve(handler), headers={"X-Team": "blue"}, timeout_s=0.3)
    assert await client.get("/json", n=3) == {"got": {"n": "3"}, "team": "blue"}
    assert await client.post("/json", [1]) == {"got": [1], "team": "blue"}
    assert await client.get("/text") == "hé"
    assert await client.request("DELETE", "/none") is None
    for path in ("/broken", "/slow"):
        with pytest.raises(InfraError):
            await client.get(path)
    with pytest.raises(InfraError, match=r"9/x.*127.0.0.1:9"):
        await HttpClient("http://127.0.0.1:9", timeout_s=5).get("/x")


async def test_a_login_happens_once_and_again_when_its_token_expires(serve: Serve) -> None:
    logins: list[str] = []
    uses: dict[str, int] = {}

    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("/login"):
            assert "Authorization" not in request.headers
            await asyncio.sleep(0.02)
            logins.append(f"t{len(logins)}")
            return web.json_response({"token": logins[-1]})
        token = request.headers.get("Authorization", "")
        uses[token] = uses.get(token, 0) + 1
        return web.Response(status=200 if uses[token] <= 20 else 401, text=token)

    client = HttpClient(await serve(handler), login=log_in)
    assert set(await asyncio.gather(*(client.get("/x") for _ in range(20)))) == {"t0"}
    assert logins == ["t0"]
    assert set(await asyncio.gather(*(client.get("/x") for _ in range(20)))) == {"t1"}
    assert logins == ["t0", "t1"]


@pytest.mark.parametrize("everywhere", [True, False])
async def test_a_token_that_no_login_renews_is_not_an_observation(
    everywhere: bool, serve: Serve
) -> None:
    """Refused everywhere it is an error of configuration; at one path, while other requests are
    accepted, a failure that is retried."""
    num_logins = 0

    async def handler(request: web.Request) -> web.Response:
        if request.path.endswith("/login"):
            return web.json_response({"token": "t"})
        return web.Response(status=401 if everywhere or request.path.endswith("/3") else 200)

    async def log_in(client: HttpClient) -> dict[str, str]:
        nonlocal num_logins
        num_logins += 1
        await client.post("/login")
        if num_logins > 1 and not everywhere:
            other.append(asyncio.ensure_future(client.get("/orders/4")))
        return {"Authorization": "t"}

    other: list[asyncio.Future[Any]] = []
    client = HttpClient(await serve(handler), login=log_in)
    if everywhere:
        with pytest.raises(ConfigError, match="401 Unauthorized after"):
            await play(client)
    else:
        with pytest.raises(OutageError, match="401 Unauthorized though"):
            await play(client)
        await asyncio.gather(*other)
    assert num_logins >= MAX_LOGINS


async def test_a_refused_login_refuses_the_run(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=403, text="wrong password")

    client = HttpClient(await serve(handler), login=log_in)
    for _ in range(2):
        with pytest.raises(ConfigError, match="rejected: wrong password"):
            await client.prepare()


def test_each_loop_has_its_own_session_which_is_closed_with_it() -> None:
    """Without a warning about an unclosed session."""
    code = """
import asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from agentenv import Task, ToolEnv, demonstrate, tool
from agentenv.contract.env import close_shared, isolated_shared
from agentenv.contract.http import HttpClient
from agentenv.adapters.testing import check_tool_env
from agentenv.envs.grading.reward import ExactMatch
import examples.http_api.server as api

server = api.Server(); server.start()
async def log_in(client):
    found = await client.post("/login", {"user": api.USER, "password": api.PASSWORD})
    return {"Authorization": "Bearer " + found["token"]}
client = HttpClient(server.url, login=log_in)

@tool
async def price(item: str) -> str:
    "What it costs."
    return str((await client.get(f"/stores/57/items/{item}"))["price"])

class Prices(ToolEnv):
    def __init__(self, task): super().__init__(task, [price], ExactMatch())

task = Task("t", "e", "q", ("7",))
turns = ["<price>Zorvex</price>", "<price>Nothing</price>", "<answer>7</answer>"]
for _ in range(2):
    asyncio.run(check_tool_env(Prices, task, turns))
rows = demonstrate(Prices, [task] * 40, lambda task, results: turns[len(results)])
assert all(row["success"] for row in rows)
async def own():
    assert await client.get("/stores/57/items/Zorvex")
    await close_shared()
asyncio.run(own())
asyncio.run(own())
print("done")
"""
    done = ran(sys.executable, "-X", "dev", "-c", code)
    assert done.stdout.strip() == "done", done.stderr
    for word in ("Unclosed", "never", "Traceback"):
        assert word not in done.stderr


class Counted(FunctionTool):
    """A tool that counts its beginnings and ends."""

    log: list[str]

    async def prepare(self) -> None:
        self.log.append("prepare")

    async def release(self) -> None:
        self.log.append("release")


async def stock(item: str) -> str:
    """How many there are."""
    return "7"


def counted() -> Counted:
    made = Counted(stock)
    made.log = []
    return made


async def test_release_is_called_once_where_shared_resources_are_closed() -> None:
    one = counted()
    envs = [ToolEnv(TASK, [one], ExactMatch()) for _ in range(3)]
    for env in envs:
        await env.reset()
        await env.close()
    assert one.log == ["prepare"] * 3
    await close_shared()
    await close_shared()
    assert one.log == ["prepare"] * 3 + ["release"]
    await envs[0].reset()  # another command, or loop
    await close_shared()
    assert one.log[-2:] == ["prepare", "release"]


def test_demonstrations_and_the_conformance_kit_release_prepared_tools() -> None:
    one = counted()
    turns = ["<stock>bolts</stock>", "<answer>7</answer>"]

    def make(task: Task) -> ToolEnv:
        return ToolEnv(task, [one], ExactMatch())

    demonstrate(make, [TASK], lambda task, results: turns[len(results)])
    assert one.log == ["prepare", "release"]
    asyncio.run(check_tool_env(make, TASK, turns))
    assert one.log.count("release") == 2
    assert one.log[-1] == "release"


@pytest.mark.parametrize("what", ["prepare", "release"])
async def test_a_failing_hook_does_not_keep_other_tools_open(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counted):
        async def prepare(self) -> None:
            await super().prepare()
            if what == "prepare":
                raise ConfigError("wrong password")

        async def release(self) -> None:
            await super().release()
            if what == "release":
                raise ValueError("no such session")

    bad, good = Failing(stock), counted()
    bad.log, bad.name = [], "bad"
    if what == "prepare":
        with pytest.raises(ConfigError, match="wrong password"):
            await ToolEnv(TASK, [bad], ExactMatch()).reset()
    await ToolEnv(TASK, [good], ExactMatch()).reset()
    if what == "release":
        await ToolEnv(TASK, [bad], ExactMatch()).reset()
    await close_shared()
    assert (bad.log, good.log) == (["prepare", "release"], ["prepare", "release"])
    assert ("the tool 'bad'" in caplog.text) == (what == "release")


class Flaky:
    """Raises these errors of a user's tool in its first calls."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.times: list[float] = []

    def env(self, task: Task) -> ToolEnv:
        @tool
        async def price(item: str) -> str:
            """The price."""
            self.times.append(asyncio.get_running_loop().time())
            if self.errors:
                raise self.errors.pop(0)
            return "7"

        return ToolEnv(task, [price], ExactMatch())


def refused(status: int, **headers: str) -> aiohttp.ClientResponseError:
    info: Any = aiohttp.RequestInfo("http://h/?key=secret", "GET", {}, "http://h/")  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(
        info,
        (),
        status=status,
        message="said so",
        headers=headers,  # type: ignore[arg-type]
    )


def test_a_429_is_retried_in_a_demonstration_as_in_a_run() -> None:
    """As an InfraError, and as an exception of raise_for_status; not before Retry-After."""
    errors = [
        InfraError("429"),
        refused(429),
        status_error(503, headers={"Retry-After": "1"}),
        aiohttp.ServerDisconnectedError(),
    ]
    flaky = Flaky(list(errors))
    turns = ["<price>bolts</price>", "<answer>7</answer>"]
    (row,) = demonstrate(flaky.env, [TASK], lambda task, results: turns[len(results)])
    assert row["success"]
    assert json.dumps(row["messages"]).count("429") == 0
    gaps = [b - a for a, b in zip(flaky.times, flaky.times[1:], strict=False)]
    assert len(gaps) == len(errors)
    assert gaps[2] >= 1.0


async def call(env: ToolEnv) -> str:
    await env.reset()
    messages, *_ = await env.step(Message("assistant", "", (ToolCall("price", {"item": "a"}),)))
    return messages[0].content


async def test_the_policy_reads_a_refusal_of_the_api() -> None:
    shown = await call(Flaky([refused(404)]).env(TASK))
    assert shown == "HTTP 404 Not Found"
    with pytest.raises(CrashError, match="KeyError"):
        await call(Flaky([KeyError("price")]).env(TASK))


async def test_a_failed_infrastructure_is_retried_and_no_other_failure() -> None:
    from agentenv.adapters.cold_start import MAX_FAILURES
    from agentenv.base.errors import EnvError

    class Failing(ToolEnv):
        errors: list[Exception]

        async def reset(self, **keys: Any) -> Any:
            if self.errors:
                raise self.errors.pop(0)
            return await super().reset(**keys)

    def play(*errors: Exception) -> list[dict[str, Any]]:
        Failing.errors = list(errors)

        def make(task: Task) -> ToolEnv:
            return Failing(task, [], ExactMatch())

        return demonstrate(make, [TASK], lambda task, results: "<answer>7</answer>")

    played = await asyncio.to_thread(play, InfraError("lost"), InfraError("down"))
    assert played[0]["success"]
    for error in (EnvError("lost"), CrashError("bug"), OutageError("gone"), ConfigError("key")):
        with pytest.raises(type(error)):
            await asyncio.to_thread(play, error)
    with pytest.raises(OutageError, match="down"):
        await asyncio.to_thread(play, *[InfraError("down")] * (MAX_FAILURES + 1))


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_errors_of_other_http_libraries_are_classified_the_same_way(library: str) -> None:
    module = pytest.importorskip(library)
    request = module.Request("GET", "http://h/")
    kinds = {429: InfraError, 500: InfraError, 404: ToolError, 401: ToolError}
    for status, kind in kinds.items():
        response = module.Response(status, request=request, headers={"Retry-After": "2"})
        with pytest.raises(module.HTTPStatusError) as caught:
            response.raise_for_status()
        found = meaning(caught.value)
        assert type(found) is kind
        assert getattr(found, "retry_after_s", 2.0) == 2.0
    assert isinstance(meaning(module.ConnectError("no")), InfraError)
    assert meaning(module.InvalidURL("no")) is None
    assert meaning(ValueError("no")) is None
    assert meaning(ConnectionError("no")) is None
