"""The Ray client process of a run: `python -m agentenv.training.workers.ray_driver`, which
training/workers/ray_placement.py starts.

Each process gets a `NodeHolder`, which Ray spreads over the nodes, and which keeps the resources as
long as the process lives.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from packaging.version import Version

from agentenv.base.errors import ConfigError, WorkerError
from agentenv.base.installation import install_hint, needed
from agentenv.base.offload import in_thread
from agentenv.cluster.messages import WorkerFigures
from agentenv.processes.link import Link
from agentenv.processes.supervisor import GRACE_S, ProcessSpec
from agentenv.processes.worker_group import serve
from agentenv.training.workers import ray_placement
from agentenv.training.workers.ray_placement import in_words, pack
from agentenv.training.workers.worker_process import main

OLDEST = "2.40"  # as in pyproject.toml
LOOK_S = 2.0  # between two polls of the nodes
STOP_S = GRACE_S + 4.0
NUM_STARTS = 4  # attempts to start a local cluster; a busy machine may need several
COUNTED = ("CPU", "GPU")
OBJECT_STORE_BYTES = 80 << 20  # the minimum that Ray accepts; agentenv does not use it

# An intermediate process, so that the started process is not a child of Ray.
DETACH = """
import json, subprocess, sys
log = open(sys.argv[1], "ab")
process = subprocess.Popen(
    json.loads(sys.argv[2]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    start_new_session=True, cwd=sys.argv[3],
)
print(process.pid)
"""


class NodeHolder:
    """A Ray actor on a node, for one process. Ray pickles the class by value, with the modules that
    it names, so the node need not have agentenv installed for it; it uses none of agentenv."""

    def start(self, command: list[str], env: dict[str, str], log: str, cwd: str) -> tuple[str, int]:
        """Start the process detached from Ray; returns node id and process id."""
        import ray

        for path, key in ((command[0], "cluster.python"), (cwd, "the project's folder")):
            if not os.path.exists(path):
                raise FileNotFoundError(
                    f"{path} does not exist on the node {socket.gethostname()} ({key}): the "
                    "project, its Python and the run's folder must be at the same paths on every "
                    "node"
                )
        os.makedirs(os.path.dirname(log), exist_ok=True)
        rest = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        found = subprocess.run(
            [sys.executable, "-I", "-S", "-c", DETACH, log, json.dumps(command), cwd],
            env={**rest, **env},
            stdout=subprocess.PIPE,
            check=True,
            timeout=30,
        )
        self.pid = int(found.stdout)
        return ray.get_runtime_context().get_node_id(), self.pid

    def is_alive(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def ended(self) -> str:
        """Wait for the end of the process."""
        while self.is_alive():  # poll: it is not a child of this process
            time.sleep(0.3)
        return "has ended"

    def stop(self, grace_s: float) -> None:
        """Stop the guard, which ends the process; after `grace_s`, kill it."""
        end = time.monotonic() + grace_s
        with_signal = signal.SIGTERM
        while self.is_alive():
            try:
                os.kill(self.pid, with_signal)
            except ProcessLookupError:
                return
            time.sleep(0.3)
            if time.monotonic() > end:
                with_signal = signal.SIGKILL


class Ray:
    """The used part of Ray's API. Its methods block and are called in threads."""

    def __init__(self, setup: ray_placement.RaySetup) -> None:
        if not setup.address:  # on Linux, Ray's sockets would listen on all addresses
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray = needed("ray", "ray", "cluster.kind = ray")
        if Version(ray.__version__) < Version(OLDEST):
            raise ConfigError(
                f"cluster.kind = ray requires Ray {OLDEST} or later, and {ray.__version__} is "
                f"installed: {install_hint('ray')} --upgrade"
            )
        self.ray = ray
        self.setup = setup

    def connect(self) -> None:
        """Connect to the cluster, or start a local one. Raises ConfigError and WorkerError."""
        setup = self.setup
        options: dict[str, Any] = {"address": setup.address or "local", "namespace": "agentenv"}
        if not setup.address:
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        for attempt in range(NUM_STARTS):
            try:
                self.ray.init(**options, log_to_driver=False, configure_logging=False)
                return
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                raise ConfigError(
                    f"cluster.address: the Ray cluster {setup.address or 'of this machine'} cannot "
                    f"be reached: {_in_one_line(error)}; start one with `ray start --head` here "
                    "and `ray start --address=HOST:6379` on other nodes, with the versions of Ray "
                    "and Python that are installed here (cluster.python sets the interpreter "
                    "there), or leave cluster.address empty"
                ) from error
            except Exception as error:  # Ray waits only half a minute for a node to start
                self.ray.shutdown()
                if attempt == NUM_STARTS - 1:
                    raise WorkerError(
                        f"Ray failed to start here: {_in_one_line(error)}; is the machine busy?"
                    ) from error

    def nodes(self) -> dict[str, dict[str, float]]:
        """CPUs and GPUs of each alive node."""
        return {
            one["NodeID"]: {name: one["Resources"].get(name, 0.0) for name in COUNTED}
            for one in self.ray.nodes()
            if one["Alive"]
        }

    def free(self) -> dict[str, dict[str, float]]:
        """Free CPUs and GPUs of each alive node."""
        from ray._private.state import state

        found = {node: dict.fromkeys(COUNTED, 0.0) for node in self.nodes()}
        with suppress(Exception):  # optional: used for preferences and messages
            every: Any = state
            for node, much in every.available_resources_per_node().items():
                if node in found:
                    found[node] = {name: much.get(name, 0.0) for name in COUNTED}
        return found

    def draining(self) -> dict[str, float]:
        """Draining nodes, with their remaining seconds."""
        from ray._private.state import state

        found = state.get_draining_nodes()
        now = time.time() * 1000
        return {node: max(0.0, (at - now) / 1000) if at else 30.0 for node, at in found.items()}

    def own_host(self) -> str:
        """The address at which nodes reach this machine."""
        return str(self.ray.util.get_node_ip_address()) if self.setup.address else "127.0.0.1"

    def hold(self, spec: ProcessSpec) -> Any:
        """Create a NodeHolder, which starts when there are resources."""
        return (
            self.ray.remote(NodeHolder)
            .options(
                num_cpus=spec.resources.get("CPU", 0),
                num_gpus=spec.resources.get("GPU", 0),
                scheduling_strategy="SPREAD",
                max_restarts=0,
                max_concurrency=3,  # `ended` waits in one of these threads
            )
            .remote()
        )


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(filter(None, lines)).replace(":; ", ": ")


class _Held:
    def __init__(self) -> None:
        self.holder: Any = None
        self.node = ""
        self.is_reported = False  # whether the draining of its node was reported
        self.task: asyncio.Task[None] | None = None


class RayDriver:
    """Executes the requests of a RayPlacement."""

    def __init__(self, ray: Ray, link: Link) -> None:
        self._ray, self._link = ray, link
        self._held: dict[str, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Work until the connection ends."""
        self._link.send(pack(await self._connected()))
        watching = asyncio.create_task(self._watch())
        try:
            await serve(self._link, self._take, lambda: pack(WorkerFigures()))
        finally:
            for task in (watching, *self._tasks):
                task.cancel()

    def _take(self, frame: bytes) -> None:
        request = ray_placement.read_request(frame)
        if isinstance(request, ray_placement.PlaceProcess):
            held = self._held[request.spec.name] = _Held()
            held.task = self._begin(self._hold(request.spec, held))
        else:
            self._begin(self._stop(request.name))

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connected(self) -> ray_placement.Connected:
        nodes = await in_thread(self._ray.nodes)
        host = self._ray.setup.host or await in_thread(self._ray.own_host)
        many = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        return ray_placement.Connected(
            host, f"Ray: {many} with {in_words(sum(map(Counter, nodes.values()), Counter()))}"
        )

    async def _hold(self, spec: ProcessSpec, held: _Held) -> None:
        how = ""
        try:
            held.holder = await in_thread(self._ray.hold, spec)
            held.node, pid = await held.holder.start.remote(
                spec.command, spec.env, spec.log, os.getcwd()
            )
            self._link.send(pack(ray_placement.ProcessStarted(spec.name, held.node, pid)))
            how = await held.holder.ended.remote()
        except Exception as error:  # of Ray, and of its actor
            cause = getattr(error, "cause", None) or error
            first = str(cause).strip().partition("\n")[0]
            how = f"is lost, according to Ray: {type(cause).__name__}: {first}"
        finally:
            if self._held.get(spec.name) is held:
                del self._held[spec.name]
            if held.holder is not None:
                with suppress(Exception):  # Ray may be gone
                    await in_thread(self._ray.ray.kill, held.holder)  # frees its resources
        self._link.send(pack(ray_placement.ProcessEnded(spec.name, how)))

    async def _stop(self, name: str) -> None:
        held = self._held.get(name)
        if held is None or held.task is None:
            self._link.send(pack(ray_placement.ProcessEnded(name, "has ended")))
            return
        if not held.node:  # it waits for resources
            held.task.cancel()
            self._link.send(pack(ray_placement.ProcessEnded(name, "was not started")))
            return
        with suppress(Exception):
            async with asyncio.timeout(STOP_S):
                await held.holder.stop.remote(GRACE_S)

    async def _watch(self) -> None:
        """Report draining nodes."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(Exception):  # of Ray, whose head node may be unreachable
                leaving = await in_thread(self._ray.draining)
                for name, held in self._held.items():
                    if held.node in leaving and not held.is_reported:
                        held.is_reported = True
                        self._link.send(pack(ray_placement.Leaves(name, leaving[held.node])))


async def check_fit(ray: Ray) -> None:
    """Raises ConfigError if the bundles of the start do not fit within wait_for_nodes_s."""
    setup, loop = ray.setup, asyncio.get_running_loop()
    end = loop.time() + setup.wait_for_nodes_s
    while True:
        nodes, free = await in_thread(ray.nodes), await in_thread(ray.free)
        missing = ray_placement.left_over([one for _, one in setup.needed], [*free.values()])
        if not missing:
            return
        if loop.time() >= end:
            break
        await asyncio.sleep(LOOK_S)
    requested = Counter(f"{key} of {in_words(bundle)}" for key, bundle in setup.needed)
    lines = [f"{count} x {what}" for what, count in requested.items()]
    has = [
        f"a node with {in_words(every)}, of which {in_words(free.get(node, {}))} free"
        for node, every in nodes.items()
    ]
    keys = dict.fromkeys(setup.needed[number][0] for number in missing)
    raise ConfigError(
        f"the Ray cluster {setup.address or 'of this machine'} has no room for {len(missing)} of "
        f"{len(setup.needed)} processes. Requested: {', '.join(lines)}. Available: "
        f"{'; '.join(has)}. Lower {' or '.join(keys)}, or the resources of each "
        "(cluster.cpus_per_worker, gpus_per_rank); let the run start with fewer workers "
        "(cluster.min_workers); or add nodes within cluster.wait_for_nodes_s"
    )


async def build(
    frame: bytes, link: Link, stack: AsyncExitStack, report: Callable[[str], None], number: int
) -> RayDriver:
    """Connect to the cluster, and check that the bundles of the start fit."""
    ray = Ray(ray_placement.read_setup(frame))
    await in_thread(ray.connect)
    stack.callback(ray.ray.shutdown)
    await check_fit(ray)
    return RayDriver(ray, link)


if __name__ == "__main__":
    sys.exit(main(build))
