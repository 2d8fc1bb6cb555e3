"""An environment in another process behaves like any other, through any failure of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agentenv.adapters.testing import check_tool_env
from agentenv.assembly.keys.rl import EnvConfig
from agentenv.assembly.parts.env_processes import EnvSetup
from agentenv.assembly.parts.environments import EnvSettings
from agentenv.base.config import to_plain
from agentenv.base.deadline import WorkClock, doing, waiting, working
from agentenv.base.errors import CrashError, EnvError, WorkerError
from agentenv.base.types import Limit, Limits, Message, Task
from agentenv.cluster.envs import EnvHost, EnvWorkers, WorkerEnv
from agentenv.cluster.messages import pack
from agentenv.contract.env import Env, EnvWrapper, StepResult, forget_shared, shared
from agentenv.processes.link import Link
from agentenv.processes.worker_group import BEAT_S, Left
from agentenv.rollout.actor import Actor
from agentenv.rollout.actor_parts import OpenEnvs
from agentenv.text.prompt import PromptConfig
from agentenv.training.workers import env_worker
from tests.support.counting_tools import ANSWER, call
from tests.support.counting_tools import TASK as COUNTED
from tests.support.links import linked
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK, AlwaysFork, make_actor
from tests.test_cluster import grown
from tests.test_testing import ShoutingEnv

T = TypeVar("T")
Make = Callable[[Task], Env]
HELD_S = 30.0
TIMEOUT_S = 20.0
PLAN = AlwaysFork(group_size=4)
SEARCH = call("search", query="a")
LAST = Message("assistant", "enough")


@pytest.fixture(autouse=True)
def _nothing_left(no_env_left_open: None) -> Iterator[None]:
    yield
    forget_shared()


class Host:
    """A host of environments and its processes, within one process."""

    def __init__(self, make: Make = CountingEnv) -> None:
        self.told = list[str]()
        self.workers = EnvWorkers(held_s=HELD_S, report=self.told.append)
        self._make = make
        self.links: dict[str, Link] = {}
        self.ends: dict[str, Link] = {}
        self.servers: dict[str, EnvHost] = {}
        self.serving: dict[str, asyncio.Task[None]] = {}
        self.joined: dict[str, asyncio.Task[Left]] = {}

    async def add(self, name: str) -> None:
        self.links[name], self.ends[name] = linked()
        self.servers[name] = EnvHost(self._make, self.ends[name], TIMEOUT_S)
        self.serving[name] = asyncio.create_task(self._serve(name))
        self.joined[name] = asyncio.create_task(self.workers.join(name, self.links[name]))
        await asyncio.sleep(0)

    async def _serve(self, name: str) -> None:
        await self.servers[name].serve()
        self.ends[name].close()  # as the end of a process does

    async def kill(self, name: str) -> Left:
        """The process dies immediately, with its environments."""
        self.links[name].abort()
        await self.serving[name]
        return await self.joined[name]

    async def close(self) -> None:
        await self.workers.close()
        await asyncio.gather(*self.serving.values(), *self.joined.values(), return_exceptions=True)


def hosted(work: Callable[[Host], Awaitable[T]], names: str = "a", make: Make = CountingEnv) -> T:
    async def run() -> T:
        host = Host(make)
        for name in names:
            await host.add(name)
        try:
            return await work(host)
        finally:
            await host.close()

    return run_virtual(run())


async def begun(host: Host, task: Task = TASK) -> WorkerEnv:
    env = host.workers.make(task)
    await env.reset(seed=1)
    return env


async def test_a_conforming_environment_also_conforms_in_a_process() -> None:
    host = Host(ShoutingEnv)
    for name in "ab":
        await host.add(name)
    actions = [call("shout", text="hi"), call(), call("shout"), call("no"), call(), ANSWER]
    await check_tool_env(host.workers.make, COUNTED, actions)
    await host.close()


def far_actor(host: Host, **others: Any) -> Actor:
    actor = make_actor(**others)
    actor.make_env = host.workers.make
    return actor


def test_trees_of_remote_environments_equal_those_of_local_ones() -> None:
    async def work(host: Host) -> list[Any]:
        actor = far_actor(host)
        trees = [actor.rollout(TASK, PLAN, index=index) for index in range(3)]
        return list(map(grown, await asyncio.gather(*trees)))

    found = hosted(work, "ab")
    here = [run_virtual(make_actor().rollout(TASK, PLAN, index=index)) for index in range(3)]
    assert found == list(map(grown, here))


def test_environments_are_placed_on_the_least_loaded_process() -> None:
    async def work(host: Host) -> list[int]:
        envs = [await begun(host) for _ in range(4)]
        forks = [await envs[0].fork() for _ in range(2)]
        other = await begun(host)  # next to the two without forks
        counts = [one.num_envs for one in host.workers.workers.values()]
        for env in (*envs, *forks, other):
            await env.close()
            await env.close()
        assert [one.num_envs for one in host.workers.workers.values()] == [0, 0]
        return sorted(counts)

    assert hosted(work, "ab") == [3, 4]


def test_a_lost_process_costs_no_trajectory() -> None:
    """Steps are repeated in fresh environments, replayed to the same state."""

    async def work(host: Host) -> tuple[Any, Left]:
        actor = far_actor(host, latency_s=0.0, engine={"latency_s": 10.0})
        growing = asyncio.create_task(actor.rollout(TASK, PLAN, index=0))
        await asyncio.sleep(35.0)
        assert host.workers.workers["a"].num_envs
        left = await host.kill("a")
        return grown(await growing), left

    tree, left = hosted(work, "ab")
    calm = make_actor(engine={"latency_s": 10.0})
    assert tree == grown(run_virtual(calm.rollout(TASK, PLAN, index=0)))
    assert left.num_ended > 0


def test_requests_to_a_lost_process_fail_and_its_environments_can_be_closed() -> None:
    async def work(host: Host) -> None:
        env = await begun(host)
        stepping = asyncio.create_task(env.step(SEARCH))
        await asyncio.sleep(1.0)
        await host.kill("a")
        with pytest.raises(EnvError, match="an environment process"):
            await stepping
        with pytest.raises(EnvError, match="is lost"):
            await env.fork()
        await env.close()
        waiting_for_one = asyncio.create_task(begun(host))
        await asyncio.sleep(100.0)
        await host.add("b")
        await (await waiting_for_one).close()

    hosted(work, make=lambda task: CountingEnv(task, latency_s=50.0))


@pytest.mark.parametrize("is_closed", [False, True])
def test_without_processes_rollouts_end(is_closed: bool) -> None:
    async def work(host: Host) -> None:
        waiting_for_one = asyncio.create_task(begun(host))
        await asyncio.sleep(1.0)
        if is_closed:
            await host.workers.close()
        else:
            host.workers.end("each died")
        with pytest.raises(WorkerError):
            await asyncio.wait_for(waiting_for_one, 5)

    hosted(work, "")


def test_a_step_that_blocks_its_process_is_a_crash_only_if_it_was_alone() -> None:
    async def work(host: Host, num: int) -> list[BaseException]:
        envs = [await begun(host) for _ in range(num)]
        steps = [asyncio.create_task(env.step(SEARCH)) for env in envs]
        await asyncio.sleep(1.0)
        host.ends["a"].send = lambda frame: None  # type: ignore[method-assign]  # as if it computed
        left = await host.joined["a"]
        assert "heartbeat" in left.why
        failures = await asyncio.gather(*steps, return_exceptions=True)
        for env in envs:
            await env.close()
        return [one for one in failures if isinstance(one, BaseException)]

    def failures(num: int) -> list[type]:
        found = hosted(lambda host: work(host, num), make=lambda task: CountingEnv(task, 900.0))
        assert len(found) == num
        return list(map(type, found))

    assert failures(1) == [CrashError]
    assert failures(2) == [EnvError, EnvError]


class Placed(EnvWrapper):
    """Its steps wait for a place for a minute, and then work for a second."""

    async def step(self, action: Message) -> StepResult:
        with waiting("a place"):
            await asyncio.sleep(60.0)
        with doing("the tool 'search'"):
            await asyncio.sleep(1.0)
        return await super().step(action)


def test_the_clock_of_a_rollout_stops_while_its_environment_waits() -> None:
    async def work(host: Host) -> tuple[float, list[str]]:
        env = await begun(host)
        with working(WorkClock()) as clock:
            stepping = asyncio.create_task(env.step(SEARCH))
            seen = []
            for _ in range(2):
                await asyncio.sleep(30.3)
                seen.append(clock.doing)
            await stepping
        await env.close()
        return clock(), [*seen, clock.doing]

    worked_s, seen = hosted(work, make=lambda task: Placed(CountingEnv(task)))
    assert worked_s == pytest.approx(1.0)
    assert seen == ["a place", "the tool 'search'", ""]


def test_a_call_not_yet_started_by_its_process_does_not_count_as_work() -> None:
    async def work(host: Host) -> float:
        env = await begun(host)
        link, held = host.ends["a"], []
        send, link.send = link.send, held.append  # type: ignore[method-assign]
        with working(WorkClock()) as clock:
            stepping = asyncio.create_task(env.step(SEARCH))
            await asyncio.sleep(BEAT_S * 5)
            link.send = send  # type: ignore[method-assign]
            for frame in held:
                send(frame)
            await stepping
        await env.close()
        return clock()

    assert hosted(work) == pytest.approx(0.0)


class Buggy(EnvWrapper):
    """Has a bug in each of its calls, by the question."""

    async def reset(self, **keys: Any) -> Any:
        if "reset" in self.env.task.question:  # type: ignore[attr-defined]
            return None
        return await super().reset(**keys)

    async def step(self, action: Message) -> Any:
        return {}["nothing"] if "step" in self.env.task.question else ([], 0)  # type: ignore[attr-defined]

    async def finish(self, *_: Any) -> Any:
        return "finished"


@pytest.mark.parametrize("question", ["reset", "step", "form", "finish"])
def test_a_bug_is_raised_as_a_crash(question: str) -> None:
    async def work(host: Host) -> None:
        env = host.workers.make(Task("t", "e", question, ()))
        if question != "reset":
            await env.reset(seed=1)
        calls = {"reset": env.reset, "finish": partial(env.finish, Limit.TURNS, None)}
        with pytest.raises(CrashError) as crash:
            await calls.get(question, partial(env.step, SEARCH))()
        if question == "step":
            assert 'return {}["nothing"]' in str(crash.value.__cause__)
        await env.close()

    hosted(work, make=lambda task: Buggy(CountingEnv(task)))


def test_bugs_of_local_environments_fail_a_rollout_but_not_the_run() -> None:
    """Also those of reset and finish that return something else than they should."""
    for question in ("reset", "finish"):
        actor = make_actor(limits=Limits(max_turns=1, max_failures=0))
        actor.make_env = lambda task: Buggy(CountingEnv(task))
        task = Task("t", "e", question, ())
        tree = run_virtual(actor.rollout(task, AlwaysFork(group_size=1), index=0))
        assert actor.failures.num == 1
        assert not list(tree.trajectories())


def test_a_cancelled_fork_leaves_no_copy() -> None:
    async def work(host: Host) -> None:
        env = await begun(host)
        for seconds in (0.0, 1.0, 60.0):
            forking = asyncio.create_task(env.fork())
            await asyncio.sleep(seconds)
            forking.cancel()
            await asyncio.gather(forking, return_exceptions=True)
            if not forking.cancelled():
                await forking.result().close()
        await env.close()
        await asyncio.sleep(200.0)
        assert CountingEnv.num_open == 0

    hosted(work, make=lambda task: CountingEnv(task, latency_s=5.0))


class Stuck(EnvWrapper):
    """Closes only when the close is cancelled."""

    def __init__(self, task: Task) -> None:
        super().__init__(CountingEnv(task))

    async def close(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await super().close()


def pending_of(host: Host) -> list[Any]:
    """The pending requests of either side of the first process."""
    server = host.servers["a"]
    return [*host.workers.workers["a"].calls, *server._calls, *server._of, *server._envs]


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S / 2, TIMEOUT_S, TIMEOUT_S * 2])
def test_an_abandoned_close_leaves_no_task(timeout_s: float) -> None:
    """The actor has its own deadline for it. Nor does the loop report it at the end."""

    async def work(host: Host) -> None:
        envs = OpenEnvs(timeout_s)
        env = host.workers.make(TASK)
        with working(WorkClock()):
            await envs.reset(env, seed=1)
            await envs.close(env, TASK.id)
        assert envs.count == 0
        await asyncio.sleep(TIMEOUT_S)
        assert CountingEnv.num_open == 0
        assert pending_of(host) == []
        closing: Any = env._closing
        assert closing.done()
        assert not closing._log_traceback, "nobody has seen what became of it"

    hosted(work, make=Stuck)


async def test_a_process_applies_the_limit_of_its_configuration(tmp_path: Path) -> None:
    env_id = f"{__name__}:Stuck"
    limits = Limits(env_timeout_s=0.01)
    settings = EnvSettings(env=EnvConfig(id=env_id), limits=limits, prompt=PromptConfig())
    frame = pack(EnvSetup(to_plain(settings), str(tmp_path)))
    link, far = linked()
    end: Any = far
    workers = EnvWorkers(held_s=HELD_S, report=print)
    async with AsyncExitStack() as stack:
        serving = asyncio.create_task((await env_worker.build(frame, end, stack, print, 0)).serve())
        joined = asyncio.create_task(workers.join("a", link))
        await asyncio.sleep(0)
        env = workers.make(Task("t", env_id, "?", ()))
        await env.reset(seed=1)
        with pytest.raises(EnvError, match=r"env.close.*0.01"):
            await env.close()
        link.abort()
        await asyncio.gather(serving, joined)


class Tally:
    """A counter shared by all environments of a process."""

    num = 0

    def stats(self) -> dict[str, float]:
        return {"tally/num_steps": self.num}


class Counted(EnvWrapper):
    """Counts its steps."""

    async def step(self, action: Message) -> StepResult:
        shared("tally", Tally).num += 1
        return await super().step(action)


def test_counters_of_a_lost_process_are_kept() -> None:
    async def work(host: Host) -> list[float]:
        env = await begun(host)
        for _ in range(3):
            await env.step(SEARCH)
        await asyncio.sleep(2 * BEAT_S)
        found = [host.workers.stats()["tally/num_steps"]]
        await host.kill("a")
        found.append(host.workers.stats()["tally/num_steps"])
        await env.close()
        return found

    assert hosted(work, make=lambda task: Counted(CountingEnv(task))) == [3.0, 3.0]
