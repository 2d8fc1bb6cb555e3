"""Time in the engine pool: what counts for a rollout, who goes first, when a server is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.actor import Actor
from agentenv.deadline import WorkClock, working
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.engines.server import ServerLoad
from agentenv.engines.server_config import PoolConfig
from agentenv.plan import Independent
from agentenv.renderer import TagRenderer
from agentenv.tree import TrajectoryTree
from agentenv.types import Limits, SamplingParams
from tests.engines.faulty_server import EOS, VOCAB_SIZE, ByteTokenizer, FaultyServer
from tests.engines.pool_bench import TEXT, Bench, virtual, write_folder
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK

TURN_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


class ChatTokenizer(ByteTokenizer):
    all_special_tokens = ()

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode("\n".join(turn["content"] for turn in chat) + "\n")}


def three_searches(prompt: str, rng: Random) -> str:
    more = prompt.count("<result>") < 3
    return f"<search>q{rng.randrange(9)}</search>" if more else "<answer>3</answer>"


def test_eight_times_as_many_branches_as_places_lose_nothing(folder: Path) -> None:
    """8 trees of 16 on 16 places, four turns of 30 s: 960 s go by, 120 of work for each."""

    async def main() -> list[TrajectoryTree]:
        config = ScriptedConfig(latency_s=TURN_S, max_model_len=4096)
        tokenizer = ChatTokenizer(folder)
        server = FaultyServer(
            "server", lambda: ScriptedEngine(config, tokenizer, script=three_searches)
        )
        pool = EnginePool(
            [server],
            folder,
            0,
            vocab_size=VOCAB_SIZE,
            eos_ids={EOS},
            config=PoolConfig(max_concurrency=16),
        )
        await pool.start(fresh=True)
        actor = Actor(
            pool,
            TagRenderer(tokenizer),
            CountingEnv,
            Limits(max_seconds=200.0, max_response_tokens=400),
            SamplingParams(max_tokens=1),
            seed=7,
        )
        rollouts = (actor.rollout(TASK, Independent(16), index=index) for index in range(8))
        trees = await asyncio.gather(*rollouts)
        assert not [leaf.error for tree in trees for leaf in tree.failures()]
        assert server.peak_running == 16
        assert asyncio.get_running_loop().time() >= 8 * 16 * 4 / 16 * TURN_S
        await pool.close()
        return trees

    trees = run_virtual(main())
    assert not any(tree.failures() for tree in trees)
    ends = [t.leaf.end for tree in trees for t in tree.trajectories()]
    assert ends == ["terminated"] * 128


@virtual(1, max_concurrency=1)
async def test_turns_that_go_on_come_before_first_ones_and_old_trees_before_new(b: Bench) -> None:
    ended: list[tuple[int, int]] = []

    async def ask(order: tuple[int, int]) -> None:
        await b.ask(order=order)
        ended.append(order)

    orders = [(1, 2), (1, 9), (1, 3), (0, 8), (0, 4), (1, 1)]
    await asyncio.gather(*(ask(order) for order in orders))
    assert ended == [(1, 2), (0, 4), (0, 8), (1, 1), (1, 3), (1, 9)]


@virtual(1, max_concurrency=1)
async def test_the_clock_of_a_rollout_runs_only_while_a_server_has_its_turn(b: Bench) -> None:
    """Turns of 2.3 s, one after the other."""

    async def ask() -> float:
        with working(WorkClock()) as clock:
            await b.ask()
        return clock()

    assert await asyncio.gather(*(ask() for _ in range(4))) == pytest.approx([2.3] * 4)


@virtual(2, max_concurrency=8)
async def test_there_is_room_while_turns_hardly_wait_and_caches_hold_what_is_under_way(
    b: Bench,
) -> None:
    """16 places, of which a tenth may be waited for; half of each cache is in use."""
    assert b.pool.has_room(10**6), "nothing is known of what a trajectory needs"
    asking = [asyncio.create_task(b.ask(session=f"{n}")) for n in range(17)]
    await asyncio.sleep(1.5)
    assert b.pool.stats()["waiting"] == 1
    assert b.pool.has_room(30)
    assert not b.pool.has_room(31), "16 running ones need one of two caches"
    asking.append(asyncio.create_task(b.ask(session="one more")))
    await asyncio.sleep(0.1)
    assert not b.pool.has_room(18), "two of 16 wait"
    await asyncio.gather(*asking)
    for server in b.servers:
        server.kill()
    await asyncio.sleep(2.0)
    assert not b.pool.has_room(0), "no server is there"
    for server in b.servers:
        server.restart()
    await b.until_up(2)


@virtual(1, max_retries=0, first_token_s=5.0)
async def test_a_turn_without_a_file_descriptor_waits_and_blames_nobody(b: Bench) -> None:
    (server,) = b.servers
    server.num_starved = 40

    async def ask() -> float:
        with working(WorkClock()) as clock:
            assert b.text(await b.ask()) == TEXT
        return clock()

    assert await ask() == pytest.approx(2.3)
    assert asyncio.get_running_loop().time() > 10.0
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"], stats["descriptor_waits"]) == (0, 0, 40)


@virtual(1)
async def test_a_server_that_is_paused_works_for_nobody(b: Bench) -> None:
    (server,) = b.servers
    load = server.load_weights

    async def slow(source: Path, policy_version: int) -> None:
        await asyncio.sleep(320.0)
        await load(source, policy_version)

    server.load_weights = slow  # type: ignore[method-assign]

    async def ask() -> float:
        with working(WorkClock()) as clock:
            await b.ask()
        return clock()

    async def says_its_load() -> ServerLoad:
        return ServerLoad(1, 0, 0.1, 0)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(1.0)
    await b.load(1)
    assert await asking == pytest.approx(1.0)  # this server samples on while it loads
    server.hanging, server.load = True, says_its_load  # type: ignore[method-assign]
    asking = asyncio.create_task(ask())
    await asyncio.sleep(20.0)
    await b.load(2)
    assert b.pool.stats()["server/0/lost"] == 0, "the pause is no silence"
    asking.cancel()
    await asyncio.wait({asking})


@virtual(2, first_token_s=50.0, silence_s=7.0)
async def test_a_server_that_falls_silent_is_lost_and_its_turns_go_on_elsewhere(b: Bench) -> None:
    """It still says that it is well."""
    first, second = b.servers

    async def well() -> bool:
        return True

    for server in b.servers:
        server.healthy = well  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    for num_lost, (delay, patience_s) in enumerate([(0.0, 50.0), (1.05, 7.0)], start=1):
        begin = loop.time()
        asking = asyncio.create_task(b.ask(session=f"{delay}", on_tokens=lambda chunk: None))
        if delay:
            await asyncio.sleep(delay)
        else:
            first.hanging = second.hanging = True
            await asyncio.sleep(patience_s - 1.0)
        home = next(server for server in b.servers if server.num_running)
        first.hanging, second.hanging = home is first, home is second
        assert b.text(await asking) == TEXT
        assert patience_s <= loop.time() - begin <= patience_s + 8.0
        assert sum(b.pool.stats()[f"server/{n}/lost"] for n in range(2)) == num_lost
        home.kill()  # what hangs in it
        home.restart()
        await b.until_up(2)


@virtual(2, silence_s=30.0)
async def test_the_seconds_of_a_server_that_went_silent_are_given_back(b: Bench) -> None:
    """It is heard of for a second and then no more; the other server samples the rest."""

    async def ask() -> tuple[float, float]:
        with working(WorkClock(outer=WorkClock())) as clock:
            assert b.text(await b.ask()) == TEXT
            assert clock._outer is not None
            return clock(), clock._outer()

    asking = asyncio.create_task(ask())
    await asyncio.sleep(1.05)
    (server,) = (one for one in b.servers if one.num_running)
    server.hanging = True
    spent_s = await asking
    assert asyncio.get_running_loop().time() > 30.0
    assert spent_s == pytest.approx((2.3, 2.3), abs=1.5), "without the silence"
