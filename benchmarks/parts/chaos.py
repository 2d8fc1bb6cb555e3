"""A fault storm: a run with failing tools, engine servers, learner and controller, and a calm run.

    benchmarks/bench.py chaos [--json -] [--long] [--times N] [--seconds S] [--short]

    tools        5 % of the calls raise an unexpected exception, 1 % hang
    servers      one server is killed every 20 s and restarts 2 s later
    learner      its rank is killed twice
    controller   killed twice; SIGTERM sent twice in a row once; disk full once (simulated by a file
                 size limit, so that no file of its processes can grow)

The calm run goes first and determines which trees are to be trained. The storm trains the same
number of steps; whenever its command ends, it is started again with --resume, as a user would. The
benchmark observes both runs only through their journals. `lost` counts trees of the calm run that
no step of the surviving line of weights trained, and finished trees that were rolled out again.
`duplicated` counts trees trained more than once. `goodput` is trees trained per second from the
first start to the last step, including all restarts. A tree takes half as long again if a tool
breaks one of its branches; the (real) learner is the bottleneck here, so rollouts have that time to
spare. The servers replay turns (mock_server.py). `--long` uses two vLLM servers on the CPU instead;
the run starts them, one is killed every 150 s, and the policy has learned to call the tool.
`--times` is the number of storms after the calm run; the figures are then sums, and the lowest
goodput.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any, Protocol

import psutil
from msgspec import Struct

from agentenv.base.errors import AgentEnvError
from agentenv.base.types import Task, ToolResult
from agentenv.contract.env import Grade
from agentenv.contract.env_registry import register
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.quickstart.setup import build_model
from agentenv.processes.guard import GUARD
from agentenv.rollout.frames import (
    DECODER,
    SUFFIX,
    Began,
    Finished,
    Frame,
    Leased,
    Trained,
    frames_of,
)
from benchmarks.parts.mock_server import SCHEMA, TOKEN_S
from tests.support.ports import held_ports

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = "chaos.toml"
TOOL_S = 0.2
HANG_S = 3600.0
MIN_SHARE = 0.7  # of the calm goodput
MAX_STALENESS = 8  # with less, the learner waits for trees with branches that tools broke
POLL_S = 0.1
VLLM = "vllm.entrypoints"
END_S = 180.0  # limit for the command to end after an event


class Size(Struct, frozen=True):
    """`calm_s` is the length of the calm run, `kill_s` the time between two server kills."""

    calm_s: float = 300.0
    kill_s: float = 20.0
    down_s: float = 2.0
    num_servers: int = 3
    long: bool = False
    prompts: int = 4
    group_size: int = 8
    token_s: float = 0.005  # short enough that the learner is the bottleneck
    checkpoint_s: float = 5.0


LONG = Size(calm_s=1200.0, kill_s=150.0, num_servers=2, long=True, checkpoint_s=60.0)
SHORT = Size(
    calm_s=6.0,
    kill_s=5.0,
    down_s=0.5,
    num_servers=2,
    prompts=2,
    group_size=4,
    token_s=0.002,
    checkpoint_s=2.0,
)


class Figures(Struct):
    """`ended` counts the command's ends by cause; `killed` counts the servers killed."""

    lost: int
    duplicated: int
    goodput: float
    calm_goodput: float
    trees: int
    calm_s: float
    storm_s: float
    killed: int
    ended: dict[str, int]
    wrong: list[str]

    @property
    def share(self) -> float:
        return self.goodput / self.calm_goodput if self.calm_goodput else 0.0


def together(storms: Sequence[Figures]) -> Figures:
    """Sum the figures of all storms; goodput is the lowest."""
    ended = sum((Counter(one.ended) for one in storms), Counter[str]())
    return Figures(
        lost=sum(one.lost for one in storms),
        duplicated=sum(one.duplicated for one in storms),
        goodput=min(one.goodput for one in storms),
        calm_goodput=storms[0].calm_goodput,
        trees=sum(one.trees for one in storms),
        calm_s=storms[0].calm_s,
        storm_s=round(sum(one.storm_s for one in storms), 1),
        killed=sum(one.killed for one in storms),
        ended=dict(ended),
        wrong=[line for one in storms for line in one.wrong],
    )


# The environment: a tool that fails, and a grader with random rewards, so that every tree is
# trained.


class Unreliable(StatelessTool):
    """A search tool whose answer depends only on the query. It fails at the given rates."""

    name = "search"
    description = "Search."
    schema = SCHEMA

    def __init__(self, exceptions: float, hangs: float) -> None:
        self._exceptions, self._hangs = exceptions, hangs
        self._rng = Random(os.urandom(8))

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        luck = self._rng.random()
        await asyncio.sleep(TOOL_S * (0.5 + self._rng.random()))
        if luck < self._exceptions:
            raise RuntimeError("the index is torn")
        if luck < self._exceptions + self._hangs:
            await asyncio.sleep(HANG_S)
        return ToolResult(f"the founder of {arguments['query']} was born in the year 1862")


class Luck:
    async def grade(self, task: Task, written: Any, calls: Any) -> Grade:
        found = _luck.random()
        return Grade(found, found > 0.5)


_luck = Random(os.urandom(8))


class ChaosEnv(ToolEnv):
    def __init__(self, task: Task, *, exceptions: float = 0.0, hangs: float = 0.0) -> None:
        tool = Unreliable(exceptions, hangs)
        super().__init__(task, tools=[tool], grader=Luck(), tool_timeout_s=2.0)


register("bench/Chaos-v0", "benchmarks.parts.chaos:ChaosEnv")


# Observation of a run from outside.


class Witness:
    """Records what the processes of a run did, from the frames of their journals in order."""

    def __init__(self) -> None:
        self.tasks: dict[int, str] = {}
        self.again: set[int] = set()  # finished, and rolled out again
        self.last_step_s = 0.0  # time.monotonic() of the last step trained
        self.num_steps = 0  # steps of the current or last process
        self._finished: set[int] = set()
        self._taken: dict[int, list[int]] = {}  # by step
        self._is_new = True

    def begin(self) -> None:
        """Record that another process of the run starts."""
        self._is_new, self.num_steps = True, 0

    def add(self, frame: Frame) -> None:
        match frame:
            case Began():
                self.tasks[frame.tree] = frame.task_id
                if frame.tree in self._finished:
                    self.again.add(frame.tree)
            case Finished():
                self._finished.add(frame.tree)
            case Leased():
                if self._is_new:  # the new process repeats the steps from this one on
                    self._taken = {s: t for s, t in self._taken.items() if s < frame.step}
                    self._is_new = False
                self._taken.setdefault(frame.step, []).extend(frame.trees)
            case Trained():
                self.last_step_s, self.num_steps = time.monotonic(), self.num_steps + 1

    def line(self) -> list[int]:
        """Return the trees that trained the surviving line of weights, in training order."""
        return [tree for step in sorted(self._taken) for tree in self._taken[step]]

    def lost(self, wanted: Sequence[int]) -> list[int]:
        return sorted(set(wanted) - set(self.line())) + sorted(self.again)

    def duplicated(self) -> list[int]:
        return sorted(tree for tree, count in Counter(self.line()).items() if count > 1)

    @property
    def step(self) -> int:
        """Number of steps of the surviving line."""
        return len(self._taken)


class Reader:
    """Reads the complete frames of a journal as they are written, in the order of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}  # bytes

    def read(self) -> Iterator[Frame]:
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            begin = self._read.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    data = file.read()
            except FileNotFoundError:  # deleted: no checkpoint needs it any more
                continue
            for offset, size, is_whole in frames_of(data):
                if is_whole:
                    self._read[path] = begin + offset + size
                    yield DECODER.decode(data[offset : offset + size])


# The processes of a run.


class Process(Protocol):
    """The parts of `subprocess.Popen` that this benchmark uses."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int) -> None: ...


def start_training(arguments: Sequence[str], output: int) -> Process:
    """Start `agentenv train` with these arguments; its output goes to the file descriptor."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "agentenv.launchers", "train", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


class Run:
    """A run of the workspace, by one process after another."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self.path = folder / "runs" / name
        self.witness = Witness()
        self.began_s = 0.0  # time.monotonic()
        self.ended: Counter[str] = Counter()
        self.last_lines: deque[str] = deque(maxlen=60)
        self._arguments = [str(folder / CONFIG), f"run.name={name}", *overrides]
        self._reader = Reader(self.path / "journal")

    @contextmanager
    def process(self) -> Iterator[Process]:
        """Run the command as a user would, with --resume after the first time."""
        arguments = list(self._arguments)
        if (self.path / "config.json").is_file():
            arguments.append("--resume")
        self.began_s = self.began_s or time.monotonic()
        self.witness.begin()
        source, output = os.pipe()  # not a file: the simulated full disk would affect it, too
        try:
            process = start_training(arguments, output)
        finally:
            os.close(output)
        reader = threading.Thread(target=self._read_output, args=(source,))
        reader.start()
        try:
            yield process
        finally:
            end_tree(process)
            reader.join()
            self.poll()

    def _read_output(self, source: int) -> None:
        with open(source, encoding="utf-8", errors="replace") as lines:
            self.last_lines.extend(lines)

    def poll(self) -> None:
        """Record the frames written since the last call."""
        for frame in self._reader.read():
            self.witness.add(frame)

    def watch(self, process: Process, condition: Callable[[], bool], limit_s: float | None) -> bool:
        """Poll until the condition holds or the process has ended. Return whether it holds."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not condition():
            if process.poll() is not None:
                return False
            if end is not None and time.monotonic() > end:
                raise AgentEnvError(f"{self.path.name} did not end; its output:\n{self.tail()}")
            time.sleep(POLL_S)
            self.poll()
        return True

    def end(self, process: Process) -> int:
        """Wait for the process to end. Return its exit status."""
        self.watch(process, lambda: process.poll() is not None, END_S)
        return process.wait()

    def tail(self) -> str:
        return "".join(self.last_lines)

    def goodput(self) -> float:
        seconds = self.witness.last_step_s - self.began_s
        return len(set(self.witness.line())) / seconds if seconds > 0 else 0.0


def end_tree(process: Process) -> None:
    """Kill a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


def below(process: Process, word: str, but: str = "\0") -> list[psutil.Process]:
    """Return the descendants with `word` and without `but` in their command lines."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(one.cmdline())
                if word in line and but not in line:
                    found.append(one)
    return found


class Servers:
    """Mock servers in their own processes, or the servers that the run starts. From `storm` on, one
    is killed every `kill_s` seconds."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.num_killed = size, 0
        self.ports: Sequence[int] = ()
        self.run: tuple[Process, Witness] | None = None  # whose servers are killed
        self._model = folder / "model"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._spares: dict[int, subprocess.Popen[bytes]] = {}  # with all imports done
        self._stop = threading.Event()
        self._storming: threading.Thread | None = None
        self._held = ExitStack()

    def __enter__(self) -> Servers:
        if not self.size.long:
            self.ports = self._held.enter_context(held_ports(self.size.num_servers))
        for port in self.ports:
            self._prepare(port)
        for port in self.ports:
            self._start(port)
        for port in self.ports:
            self._until_open(port)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._storming is not None:
            self._storming.join()
        for process in (*self._processes.values(), *self._spares.values()):
            process.kill()
            process.communicate()
        self._held.close()

    def _prepare(self, port: int) -> None:
        scale = self.size.token_s / TOKEN_S
        command = [
            sys.executable,
            "-m",
            "benchmarks.parts.mock_server",
            str(port),
            str(self._model),
        ]
        self._spares[port] = subprocess.Popen(
            [*command, str(scale)], cwd=ROOT, stdin=subprocess.PIPE
        )

    def _start(self, port: int) -> None:
        process = self._processes[port] = self._spares.pop(port)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        self._prepare(port)

    def pids(self) -> dict[str, int]:
        """Return the process IDs by URL."""
        return {f"http://127.0.0.1:{port}": one.pid for port, one in self._processes.items()}

    def revive(self) -> int:
        """Restart the killed servers without waiting for them. Return their number."""
        dead = [port for port, one in self._processes.items() if one.poll() is not None]
        for port in dead:
            self._processes[port].communicate()
            self._start(port)
        return len(dead)

    def storm(self) -> None:
        self._storming = threading.Thread(target=self._storm)
        self._storming.start()

    def _storm(self) -> None:
        number = 0
        while not self._stop.wait(self.size.kill_s):
            self.num_killed += self._kill(number)
            number += 1

    def _kill(self, number: int) -> bool:
        if not self.ports:
            return self._kill_started(number)
        port = self.ports[number % len(self.ports)]
        self._processes[port].kill()
        self._processes[port].communicate()
        self._stop.wait(self.size.down_s)
        self._start(port)
        self._until_open(port)
        return True

    def _kill_started(self, number: int) -> bool:
        """Kill a server that the run started, unless the current process has trained no step yet:
        vLLM servers take longer to start than mock servers."""
        process, witness = self.run or (None, None)
        found = below(process, VLLM, but=GUARD.name) if process else []
        if not found or not witness or not witness.num_steps:
            return False
        with suppress(psutil.NoSuchProcess):
            found[number % len(found)].kill()
        return True

    def _until_open(self, port: int) -> None:
        while not self._stop.wait(POLL_S):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return


# The faults of the run.


def kill_controller(process: Process) -> None:
    process.kill()


def kill_learner(process: Process) -> None:
    for one in below(process, "agentenv.learners.ranks.rank_process"):
        one.kill()


def signal_twice(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)


def fill_disk(process: Process) -> None:
    """Stop all files of the run's processes from growing, as on a full disk."""
    for one in (
        psutil.Process(process.pid),
        *below(process, "agentenv.learners.ranks.rank_process"),
    ):
        with suppress(psutil.NoSuchProcess):
            one.rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


EVENTS: tuple[tuple[str, Callable[[Process], None]], ...] = (
    ("controller killed", kill_controller),
    ("learner killed", kill_learner),
    ("SIGTERM twice", signal_twice),
    ("disk full", fill_disk),
    ("controller killed", kill_controller),
    ("learner killed", kill_learner),
)


def run(
    size: Size, report: Callable[[str], None] = lambda text: None, num_storms: int = 1
) -> list[Figures]:
    """Run the calm run, then the storms. Raises AgentEnvError if one makes no progress."""
    with tempfile.TemporaryDirectory(prefix="agentenv-chaos-") as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder)
        servers = stack.enter_context(Servers(size, folder))
        write_workspace(folder, size, servers.ports)
        calm = run_calm(Run(folder, "calm"), size)
        num_steps = calm.witness.step
        report(f"calm: {num_steps} steps, {calm.goodput():.2f} trees per second")
        servers.storm()
        found = []
        for number in range(1, num_storms + 1):
            storm = Run(
                folder,
                f"storm-{number}",
                f"train.num_steps={num_steps}",
                "env.kwargs.exceptions=0.05",
                "env.kwargs.hangs=0.01",
            )
            num_killed = servers.num_killed
            run_storm(storm, servers, num_steps, report)
            found.append(figures_of(calm, storm, servers.num_killed - num_killed))
            report(f"storm {number} of {num_storms}: {found[-1]}")
        return found


def run_calm(calm: Run, size: Size) -> Run:
    """Run for `calm_s` seconds."""
    with calm.process() as process:
        end = time.monotonic() + size.calm_s

        def is_over() -> bool:
            return time.monotonic() > end and calm.witness.num_steps > len(EVENTS)

        if calm.watch(process, is_over, None):
            process.send_signal(signal.SIGTERM)
        if calm.end(process) != 130:
            raise AgentEnvError(f"the calm run failed; its output:\n{calm.tail()}")
    return calm


def run_storm(storm: Run, servers: Servers, num_steps: int, report: Callable[[str], None]) -> None:
    """Run to the last step. The events are spread evenly over the steps, and each waits until the
    current process has trained a step."""
    events = deque(enumerate(EVENTS, 1))
    witness = storm.witness
    while True:
        with storm.process() as process:
            servers.run = process, witness
            what = "by itself"
            if events:
                number, (what, act) = events[0]

                def is_due(due: int = num_steps * number // (len(EVENTS) + 1)) -> bool:
                    return witness.step >= due and witness.num_steps > 0

                if storm.watch(process, is_due, None):
                    act(process)
                    events.popleft()
                else:
                    what = "by itself"
                code = storm.end(process)
            else:
                storm.watch(process, lambda: False, None)
                code = process.wait()
        report(f"{what}, after step {witness.step} of {num_steps}: exit status {code}")
        if code == 0:
            break
        if what == "by itself":
            report("".join(list(storm.last_lines)[-3:]).rstrip())
        storm.ended[what] += 1
        if storm.ended["by itself"] > len(EVENTS):
            raise AgentEnvError(f"the storm makes no progress; its output:\n{storm.tail()}")
    if events:
        raise AgentEnvError(f"the storm was over before {events[0][1][0]!r}")


def figures_of(calm: Run, storm: Run, num_killed: int) -> Figures:
    wanted = calm.witness.line()
    ours, theirs = storm.witness.tasks, calm.witness.tasks
    others = [tree for tree in wanted if ours.get(tree) != theirs[tree]]
    extra = sorted(set(storm.witness.line()) - set(wanted))
    lost, duplicated = storm.witness.lost(wanted), storm.witness.duplicated()
    wrong = [f"lost: {lost}"] if lost else []
    wrong += [f"duplicated: {duplicated}"] if duplicated else []
    wrong += [f"trees of other tasks: {others}"] if others else []
    wrong += [f"trees missing in the calm run: {extra}"] if extra else []
    wrong += [f"calm run duplicated: {again}"] if (again := calm.witness.duplicated()) else []
    return Figures(
        lost=len(lost),
        duplicated=len(duplicated),
        goodput=round(storm.goodput(), 3),
        calm_goodput=round(calm.goodput(), 3),
        trees=len(wanted),
        calm_s=round(calm.witness.last_step_s - calm.began_s, 1),
        storm_s=round(storm.witness.last_step_s - storm.began_s, 1),
        killed=num_killed,
        ended=dict(storm.ended),
        wrong=wrong,
    )


def make_model(folder: Path) -> None:
    with redirect_stdout(sys.stderr):  # DeepSpeed prints what it found
        build_model(folder / "model", seed=0)


def write_workspace(folder: Path, size: Size, ports: Sequence[int]) -> None:
    """Write the questions and the configuration."""
    rows = [{"question": f"Which one is it? ({n})", "answer": "it"} for n in range(512)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [
        {"action": "<search>it</search>", "result": "the founder of it was born in the year 1862"}
    ]
    turns += [{"action": "<answer>it</answer>"}]
    shown = [{"question": row["question"], "turns": turns} for row in rows[:64]]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    engine, more = f"urls = {json.dumps(urls)}", ""
    if size.long:
        engine = ""
        more = f'''
[engine.servers]
num_servers = {size.num_servers}
max_num_seqs = 16
device = "cpu"
[sft]
data = "{folder}/sft.jsonl"
gate = "{folder}/sft.jsonl"
[[sft.stages]]
num_steps = 150
'''
    (folder / CONFIG).write_text(f"""
[run]
dir = "{folder}/runs"
[model]
path = "{folder}/model"
[env]
id = "bench/Chaos-v0"
module = "benchmarks.parts.chaos"
trial = false
kwargs = {{ exceptions = 0.0, hangs = 0.0 }}
[data]
train = "{folder}/train.jsonl"
[limits]
max_prompt_tokens = 256
max_response_tokens = 760
max_turn_tokens = 64
max_tool_result_tokens = 60
max_failed_share = 0.5
max_failures = 64
[algorithm]
name = "arpo"
group_size = {size.group_size}
entropy_window = 10
[queue]
groups_per_step = {size.prompts}
max_staleness = {MAX_STALENESS}
[learner]
groups_per_minibatch = {size.prompts}
learning_rate = 1e-6
[engine]
name = "vllm"
max_model_len = 1024
{engine}
[engine.pool]
first_token_s = 30
silence_s = 10
{more}
[checkpoint]
minutes = {size.checkpoint_s / 60}
[train]
num_steps = 1000000
max_logprob_gap = 1e9
""")
