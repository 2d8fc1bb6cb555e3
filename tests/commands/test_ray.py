"""Runs whose rollout workers are placed by Ray, on its test cluster of several nodes on this
machine: they end like undisturbed ones, through any loss of nodes or of Ray."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from agentenv.assembly.run.exits import first_reason
from agentenv.base.errors import ConfigError
from agentenv.training.loop.training import Training
from agentenv.training.workers.ray_placement import (
    Leaves,
    ProcessStarted,
    RayPlacement,
    in_words,
    left_over,
)
from benchmarks.parts.chaos import CONFIG, MAX_STALENESS, SHORT, make_model, write_workspace
from tests.commands.test_rollout_workers import SLOW, end, log_of, run, taken, tasks, trees
from tests.support.polling import until
from tests.support.runs import rows_of
from tests.support.toy_rank import toy_ranks
from tests.support.warehouse import ROOT

STORE_BYTES = 80 << 20
RAY = ["cluster.kind=ray", "eval.sets={}", "queue.max_staleness=1"]
ALONE = "eval.sets={}", "queue.max_staleness=1"


@pytest.fixture(autouse=True, scope="module")
def _light(warehouse: Path) -> Iterator[None]:
    """Nothing is learned and nothing drawn; processes on nodes find the environment."""
    pytest.importorskip("ray")
    with toy_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(warehouse.parent))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        yield


def retry_start(begin: Callable[[], Any]) -> Any:
    """Ray gives a node half a minute to come up, which a busy machine may not have."""
    for _ in range(5):
        with suppress(Exception):
            return begin()
    return begin()


class Nodes:
    """A Ray cluster whose nodes are processes of this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = retry_start(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, num_cpus: int = 1) -> str:
        """The id of a new node."""
        keys = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES}
        node = retry_start(lambda: self.cluster.add_node(**keys))
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, training: Training, node: str) -> list[str]:
        """As when its machine loses its power; the names of ours that were on it."""
        killed = []
        for name, started in started_on(training).items():
            if started.node == node:
                killed.append(name)
                kill_tree(started.pid)
        self.cluster.remove_node(self.nodes.pop(node), allow_graceful=False)
        return killed

    def close(self) -> None:
        self.cluster.shutdown()


def kill_tree(pid: int) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                one.kill()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


@pytest.fixture(scope="module")
def calm(warehouse: Path) -> Path:
    """A run in one process, and of as many steps."""
    return run(warehouse, "calm-beside-ray", *ALONE, *SLOW)


def on(nodes: Nodes, *overrides: str) -> list[str]:
    return [*RAY, *SLOW, f"cluster.address={nodes.address}", "cluster.host=127.0.0.1", *overrides]


def ray_of(training: Training) -> RayPlacement:
    found = training.loop.parts.ray
    assert found is not None
    return found


def started_on(training: Training) -> dict[str, ProcessStarted]:
    wanted = ray_of(training)._wanted.items()
    return {name: one.started.result() for name, one in wanted if one.started.done()}


def placed(training: Training) -> dict[str, str]:
    """The node of each process."""
    return {name: one.node for name, one in started_on(training).items()}


@pytest.mark.parametrize("num_nodes", [2, 4])
def test_a_killed_node_costs_no_tree_and_a_joining_node_is_used(
    warehouse: Path, calm: Path, nodes: Nodes, num_nodes: int, repeats: int
) -> None:
    """`make long PARTS=nodes` does it ten times on each number of nodes."""
    if num_nodes > 2 and repeats == 1:
        pytest.skip("more nodes are for `make long`")
    for _ in range(num_nodes):
        nodes.add()
    for nth in range(repeats):
        told: list[str] = []

        async def storm(training: Training, told: list[str] = told) -> None:
            await until(lambda: training.state.step >= 2)
            workers, before = training.loop.feeder.workers, placed(training)
            assert workers is not None
            assert len(set(before.values())) == num_nodes  # spread
            (name,) = nodes.kill(training, before["worker-1"])
            await until(lambda: workers.num_lost == 1)
            joined = nodes.add()
            await until(lambda: placed(training).get(name) == joined)
            await until(lambda: workers.stats()["up"] == num_nodes)
            told.append(name)
            await until(lambda: training.state.step >= 8)
            end()

        keys = on(nodes, "train.num_steps=10000", f"cluster.workers={num_nodes}")
        name = f"ray-killed-{num_nodes}-{nth}"
        with pytest.raises(asyncio.CancelledError):
            run(warehouse, name, *keys, during=storm)
        found = warehouse.parent / "runs" / f"workers-{name}"
        assert told == ["worker-1"]
        assert taken(found)[: len(taken(calm))] == taken(calm)  # 0 lost, in their order
        assert len(set(taken(found))) == len(taken(found))  # 0 duplicated
        both = trees(found)  # which asserts the bound
        assert {index: both[index] for index in trees(calm)} == trees(calm)
        assert rows_of(found)[-1]["workers/lost"] == 1


def test_a_run_continues_after_its_cluster_loses_the_head_node(
    warehouse: Path, calm: Path, nodes: Nodes
) -> None:
    nodes.add(2)

    async def kill_head(training: Training) -> None:
        await until(lambda: training.state.step >= 1)
        for kind in list(nodes.cluster.head_node.all_processes.values()):
            for info in kind:
                kill_tree(info.process.pid)
        for node in nodes.nodes.values():
            node.kill_all_processes(check_alive=False)

    found = run(warehouse, "ray-headless", *on(nodes), during=kill_head)
    assert trees(found) == trees(calm)
    assert rows_of(found)[-1]["workers/lost"] == 0


def test_a_drained_node_finishes_its_trees_first(warehouse: Path, calm: Path, nodes: Nodes) -> None:
    nodes.add(), nodes.add()

    async def drain(training: Training) -> None:
        await until(lambda: training.state.step >= 1)
        ray = ray_of(training)
        ray.take(ray.workers["ray-0"], Leaves("worker-0", 30.0))  # as Ray reports a node

    found = run(warehouse, "ray-drained", *on(nodes), during=drain)
    assert trees(found) == trees(calm)
    assert "worker-0 leaves within" in log_of(found)
    last = [row for row in rows_of(found) if "workers/up" in row][-1]
    assert last["workers/lost"] == last["workers/trees_moved"] == 0


def test_a_cluster_without_room_is_refused_first(warehouse: Path, nodes: Nodes) -> None:
    nodes.add(1), nodes.add(1)
    with pytest.raises((BaseExceptionGroup, ConfigError)) as ended:
        run(warehouse, "ray-large", *on(nodes, "cluster.workers=3"))
    text = str(first_reason(ended.value))
    assert "3 x cluster.workers" in text
    assert "node with 1" in text
    assert "cluster.min_workers" in text


def test_bundles_are_distributed_over_nodes() -> None:
    two = [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert left_over([{"CPU": 1.0}] * 4, two) == []
    assert left_over([{"CPU": 1.0}] * 5, two) == [4]
    assert left_over([{"CPU": 3.0}], two) == [0]  # four are free, but not on one node
    assert left_over([{"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}], two) == []
    assert in_words({"CPU": 2.0, "GPU": 1.0}) == "2 CPUs and 1 GPU"


# Engine servers on nodes.

SIZE = replace(SHORT, num_servers=2, token_s=0.01)
# In place of the interpreter of vLLM's environment: a server that recites.
PYTHON = f"""#!{sys.executable}
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.parts.mock_server import TOKEN_S, Replayed, MockServer
value = dict(zip(sys.argv, sys.argv[1:]))

async def main():
    model = Path(value["--model"])
    scale = {SIZE.token_s} / TOKEN_S
    server = MockServer("", int(value["--port"]), Replayed(model), model, scale)
    await server.open()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose engine servers recite."""
    folder = tmp_path_factory.mktemp("replaying")
    make_model(folder)
    write_workspace(folder, SIZE, [1, 2])
    text = (folder / CONFIG).read_text()
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    servers = f'[engine.servers]\nnum_servers = 2\ndevice = "cpu"\npython = "{python}"\n'
    text = re.sub(r"(?m)^urls = .*\n", "", text)
    (folder / CONFIG).write_text(text + servers)
    return folder / CONFIG


def test_a_killed_engine_node_costs_no_tree(replaying: Path, nodes: Nodes, repeats: int) -> None:
    keys = ["train.num_steps=6", "checkpoint.minutes=60", "eval.sets={}"]
    calm = run(replaying, "calm-on-servers", *keys)
    for nth in range(repeats):
        while len(nodes.nodes) < 4:
            nodes.add()
        killed_engine_node(replaying, nodes, calm, keys, f"engine-killed-{nth}")


def killed_engine_node(
    replaying: Path, nodes: Nodes, calm: Path, keys: list[str], name: str
) -> None:
    """A run whose engine node is killed and whose server restarts on another node."""
    told: list[str] = []

    async def kill(training: Training) -> None:
        await until(lambda: training.state.step >= 2)
        before = placed(training)
        assert len(set(before.values())) == 4
        assert nodes.kill(training, before["engine-1"]) == ["engine-1"]
        nodes.add()
        await until(lambda: placed(training).get("engine-1") not in (None, before["engine-1"]))
        await until(lambda: "engine-1 is back" in log_of(folder))
        told.append("moved")
        await until(lambda: training.state.step >= 6)
        end()

    ray = ["cluster.kind=ray", "cluster.engines=true", f"cluster.address={nodes.address}"]
    more = ["cluster.host=127.0.0.1", "train.num_steps=10000"]
    folder = found = replaying.parent / "runs" / f"workers-{name}"
    with pytest.raises(asyncio.CancelledError):
        run(replaying, name, *keys, *ray, *more, during=kill)
    assert told == ["moved"]
    expected, both = (tasks(one, MAX_STALENESS) for one in (calm, found))
    assert {index: both[index] for index in expected} == expected  # 0 lost
    assert len(set(taken(found))) == len(taken(found))  # 0 duplicated
    assert "engine-1 is lost" in log_of(found)
