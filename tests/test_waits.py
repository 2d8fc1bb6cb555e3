"""Every wait for something outside of the process has a deadline.

A call counts as such a wait if it is one of OUTSIDE below: of sockets, programs, threads, HTTP,
locks of files, queues. It has a deadline if one of these holds:

    it is, in its function, inside of asyncio.timeout, timeout_at or Deadline, or an argument of
    within, at_most or asyncio.wait_for
    it has a time limit itself: timeout=.., timeout_s=.., or the equivalent of its library
    it is in ALLOWED, where the reason names its bound

`in_thread`, `start_process` and `kill` of agentenv/base/offload.py bound the work that they start.
Tasks and futures of the same loop do not count: their own waits do.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.sources import texts
from tests.test_loop_disk import check_allowed, name_of

SOCKETS = {"sock_recv", "sock_recv_into", "sock_sendall", "sock_accept", "sock_connect"}
SOCKETS |= {"readexactly", "readuntil", "readline", "drain", "wait_closed", "open_connection"}
SOCKETS |= {"recv", "recv_into", "recvmsg", "recv_fds", "accept", "sendall"}
PROGRAMS = {"communicate", "waitpid", "waitid", "check_output", "check_call", "urlopen"}
THREADS = {
    "to_thread",
    "run_in_executor",
    "wrap_future",
    "run_coroutine_threadsafe",
    "create_subprocess_exec",
}
FOREIGN = {"initialize", "list_tools", "call_tool", "send_ping"}  # of the package mcp
OUTSIDE = SOCKETS | PROGRAMS | THREADS | FOREIGN
BARE = {"wait", "join", "get", "acquire"}  # of events, programs, threads, queues: without arguments
TIMES = {"timeout", "timeout_s", "limit_s"}
BOUNDS = {"timeout", "timeout_at", "within", "at_most", "wait_for", "Deadline", "after"}
BOUNDS |= {"_deadline"}

CHILD = "a child waits for what its parent asks, and ends with the connection"
CALLER = "its callers bound it: "
BEATS = "a worker that says nothing is given up, and one without its controller ends"
SAME = "an event of the same loop; who sets it has a deadline"
PEER = CALLER + "Sandbox._ask, fork, spawn and the self-test"
ANSWER = "settimeout(ANSWER_TIMEOUT_S)"
PERSON = "until a person says so, who can see it, or the run ends"
FOREVER = "until a signal, or as long as what it looks after lives"

HERE = "a queue or a lock in this process"
ALLOWED = {
    "assembly/run/terminal.py LogFile._write: self._lines.get": HERE,
    "agentenv/rollout/actor_parts.py ActorParts.until_resumed: self._unpaused.wait": PERSON,
    "agentenv/rollout/branch.py TurnState.held: event.wait": SAME,
    "agentenv/processes/link.py Link.receive: self._reader.readexactly": BEATS,
    "agentenv/base/deadline.py admitted: places.acquire": SAME,
    "agentenv/base/disk.py locked: fcntl.flock": "others only look whether it is free",
    "agentenv/engines/embedded/engine.py EmbeddedEngine._serve: self._commands.get": HERE,
    "agentenv/engines/pool/pool.py EnginePool._until_taken: self._returned.wait": SAME,
    "agentenv/engines/pool/weight_transfer.py share_weights.leave: released.wait": CALLER
    + "_replace",
    "agentenv/engines/remote/base.py RemoteServer._known: self._open.wait": SAME,
    "agentenv/processes/link.py _exactly: connection.recv": CHILD,
    "agentenv/processes/worker_pool.py _send: sock.sendall": CHILD,
    "agentenv/processes/link.py Link.drain: self._writer.drain": CALLER + "RankGroup._settle",
    "agentenv/processes/supervisor.py LocalProcess.ended: self._guard.wait": FOREVER,
    "agentenv/processes/guard.py _own_folder: fcntl.flock": "others only look, as in disk.py",
    "agentenv/processes/guard.py main: server.wait": "it was killed",
    "agentenv/adapters/gym.py LoopThread.run: asyncio.run_coroutine_threadsafe": "timeout_s",
    "agentenv/rollout/journal.py Journal.commit: self._written.wait": SAME,
    "agentenv/rollout/queue.py ReplayQueue.get: self._arrived.wait": SAME,
    "agentenv/rollout/queue.py ReplayQueue.reserve: self._freed.wait": SAME,
    "envs/bridges/mcp_tools.py _all_tools: session.list_tools": CALLER + "START_TIMEOUT_S",
    "envs/bridges/mcp_tools.py Connection._open: session.initialize": CALLER + "START_TIMEOUT_S",
    "envs/sandbox/process.py SessionProcess._read: asyncio.get_running_loop().sock_recv": PEER,
    "envs/sandbox/process.py SessionProcess._send: asyncio.get_running_loop().sock_sendall": PEER,
    "envs/sandbox/fork_broker.py ForkInitializer.initialize: self._socket.recv": ANSWER,
    "envs/sandbox/fork_broker.py ForkInitializer.initialize: self._socket.sendall": ANSWER,
    "envs/sandbox/fork_broker.py _serve: os.waitpid": CHILD,
    "envs/sandbox/fork_broker.py _serve: requests.recv": CHILD,
    "envs/sandbox/fork_broker.py _serve: requests.sendall": CHILD,
    "envs/sandbox/process.py ZygoteProcess._on_news: socket.recv_fds": "the socket never blocks",
    "envs/sandbox/sandbox.py Sandbox._wait_for_room: self._freed.wait": SAME,
    "envs/sandbox/zygote.py _serve: socket.recv_fds": CHILD,
    "envs/program.py ProgramEnv._next: self._program.wait": "asyncio.wait with the limits, below",
    "envs/sandbox/launch.py ControlledProcess.started: socket.recv_fds": "the socket never blocks",
    "envs/sandbox/program.py Program._ended: asyncio.get_running_loop().sock_recv": "the limits",
    "envs/sandbox/program_init.py main: control.recv": CHILD,
    "envs/sandbox/program_init.py _forward: listener.accept": "a thread, in the sandbox",
    "envs/sandbox/program_init.py _pump: source.recv": "the same",
    "envs/sandbox/program_init.py _pump: target.sendall": "the same",
    "envs/sandbox/zygote.py _serve: select.select": CHILD,
    "envs/sandbox/zygote.py main: control.recv": CHILD,
    "agentenv/processes/worker_pool.py _ForkServer.load: loop.sock_recv": CALLER + "_over_a_bound",
    "agentenv/processes/worker_pool.py main: socket.recv_fds": CHILD,
    "assembly/run/watchdog.py Watchdog._run: self._signals.recv": "settimeout(BEAT_S)",
    "assembly/reports/monitors.py Monitors._run: self._calls.get": HERE,
    "agentenv/base/offload.py Machine.start_process: asyncio.create_subprocess_exec": "within",
    "evaluation/sweep.py _train: process.wait": "a run takes as long as it takes",
    "envs/bridges/openenv.py OpenEnvSession.begin: self.server.freed.wait": SAME,
    "training/loop/feeder.py Feeder.until_resumed: self._resumed.wait": PERSON,
    "launchers/command.py until_stopped: stop.wait": FOREVER,
    "agentenv/endpoint/capture.py CaptureSession.next: self._came.wait": "env, end of the program",
    "agentenv/endpoint/capture.py CaptureSession.reward: self._rewarded.wait": "the same",
    "envs/bridges/verifiers_env.py VerifiersRollout.wait: self.process.wait": CALLER
    + "ProgramEnv._next, and stop",
    "envs/bridges/verifiers_env.py _serve: asyncio.to_thread": CHILD,
    "agentenv/endpoint/server.py ApiServer._stream: queue.get": SAME,
    "lab/viewing/page.py serve: asyncio.Event().wait": FOREVER,
    "assembly/run/control.py send: connection.sendall": "settimeout, above",
    "learners/ranks/broadcast.py TorchLink.start: work.wait": "it is completed",
    "learners/ranks/rank_process.py main: connection.sendall": CHILD,
    "learners/ranks/rank_process.py serve: connection.sendall": CHILD,
}
NO_WAITS = {"_current.get", "capture.get", "LoopThread.acquire"}  # their names alone


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _has_time(call: ast.Call) -> bool:
    return any(one.arg in TIMES and not _is_none(one.value) for one in call.keywords)


def _is_wait(call: ast.Call) -> bool:
    name, text = name_of(call), ast.unparse(call)
    if name in BARE and isinstance(call.func, ast.Attribute):
        return not call.args and not call.keywords and ast.unparse(call.func) not in NO_WAITS
    if name == "drain":
        return "writer" in text
    if name in FOREIGN:
        return text.startswith("session.")
    if name == "flock":
        return "LOCK_NB" not in text and "LOCK_UN" not in text
    if name in ("waitpid", "waitid"):
        return "WNOHANG" not in text
    if name == "select":
        return text.startswith("select.") and (
            len(call.args) < 4 or "None" in ast.unparse(call.args[3])
        )
    if name in ("recv", "recvmsg", "recv_fds"):
        return "MSG_PEEK" not in text and "MSG_DONTWAIT" not in text
    if name in ("run", "call"):
        return text.startswith("subprocess.")
    if name == "ClientTimeout":
        return "total=None" in text and "sock_read=" not in text
    return text.startswith("sqlite3.") if name == "connect" else name in OUTSIDE


class _Walk(ast.NodeVisitor):
    """Waits without a deadline, as "function: call"."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._names: list[str] = []
        self._bounded = False

    def _inside(self, node: ast.AST, name: str) -> None:
        self._names.append(name)
        before, self._bounded = self._bounded, False
        self.generic_visit(node)
        self._bounded = before
        self._names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node, node.name)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        before = self._bounded
        for item in node.items:
            self.visit(item)  # later ones are inside earlier ones
            call = item.context_expr
            if isinstance(call, ast.Call) and name_of(call) in BOUNDS:
                self._bounded = self._bounded or not any(map(_is_none, call.args))
        for statement in node.body:
            self.visit(statement)
        self._bounded = before

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_wait(node) and not self._bounded and not _has_time(node):
            self.found.append((".".join(self._names), ast.unparse(node.func)))
        before = self._bounded
        self._bounded = before or (name_of(node) in BOUNDS and not any(map(_is_none, node.args)))
        self.generic_visit(node)
        self._bounded = before


def waits_in(source: str) -> list[tuple[str, str]]:
    """(function, called name) of each wait without a deadline."""
    walk = _Walk()
    walk.visit(ast.parse(source))
    return walk.found


def test_every_wait_for_something_outside_has_a_deadline() -> None:
    found = {
        f"{name} {function}: {call}"
        for name, text in texts().items()
        for function, call in waits_in(text)
    }
    check_allowed(found, {*ALLOWED}, "give it a deadline, or say in ALLOWED who bounds it")


@pytest.mark.parametrize(
    "planted",
    [
        "await asyncio.get_running_loop().sock_recv(s, 1)",
        "await process.wait()",
        "process.wait()",
        "await reader.readexactly(4)",
        "subprocess.run(['true'])",
        "async with asyncio.timeout(None):\n        await writer.drain()",
        "async with asyncio.timeout(5):\n        pass\n    await writer.drain()",
        "thread.join()",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "await asyncio.to_thread(len, '')",
        "aiohttp.ClientTimeout(total=None, sock_connect=5)",
        "select.select([s], [], [])",
        "item = queue.get()",
    ],
)
def test_the_walk_finds_a_planted_violation(planted: str) -> None:
    assert len(waits_in(f"async def f():\n    {planted}\n")) == 1


@pytest.mark.parametrize(
    "bounded",
    [
        "async with asyncio.timeout(5):\n        await reader.readexactly(4)",
        "with Deadline.after(5, 'x', E):\n        await writer.drain()",
        "await within(5, 'x', writer.drain())",
        "await asyncio.wait_for(process.wait(), 5)",
        "subprocess.run(['true'], timeout=5)",
        "thread.join(0.1)",
        "', '.join(names)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "select.select([s], [], [], 0.2)",
        "await in_thread(len, '')",
    ],
)
def test_the_walk_recognizes_a_deadline(bounded: str) -> None:
    assert waits_in(f"async def f():\n    {bounded}\n") == []
