"""Many engine servers as one engine; one server is a pool of one.

Versions: a request that starts after an update never goes to a server with older weights, even if
no other is left; it waits for an updated server, within `max_outage_s`. Otherwise an update that a
single server missed would violate the bound on staleness. Running requests on a server that refused
an update continue there, under the versions that they report.

EnginePool     members, assignment of slots, the target weights (here)
PooledServer   one server: its state, which follows from outcomes of requests (server.py)
PooledTurn     one call of generate, by requests to one or more servers in sequence (turn.py)

Each server has a Keeper (keeper.py), which also has the transports of weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from agentenv.base.deadline import WorkClock, cancel_all, uncancelled
from agentenv.base.errors import ConfigError, EngineDeadError, EngineError
from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.engine import Feature
from agentenv.contract.request import BusyError, ServerLostError, ServerRequest
from agentenv.contract.server_config import PoolConfig
from agentenv.contract.weights import Sender, SharedSender
from agentenv.engines.pool.keeper import Keeper, Target
from agentenv.engines.pool.limit import FULL
from agentenv.engines.pool.server import Lost, Outcome, PooledServer, problems
from agentenv.engines.pool.turn import TurnEngine
from agentenv.engines.pool.weight_transfer import Broadcast, share_weights
from agentenv.engines.remote.base import sampled
from agentenv.engines.remote.weight_sync import Server

logger = logging.getLogger(__name__)

MAX_SESSIONS = 65536  # with a remembered home
MAX_WAITING = 0.1  # waiting turns per slot above which no tree begins
MIN_RUNNING = 8  # minimum number of requests for an estimate of their cache usage
# By feature: the key that requires it, and the remedy for a server without it.
LACKS = {
    "adapters": (
        'engine.lora = "adapter"',
        "does not support adapters: vLLM needs --enable-lora, --max-lora-rank and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    ),
    "broadcast": (
        'engine.weights = "broadcast"',
        'does not support it: vLLM needs --weight-transfer-config \'{"backend": "nccl"}\', SGLang '
        "needs 0.5.23 or newer",
    ),
    "ipc": (
        'engine.weights = "ipc"',
        "cannot read the learner's memory: this requires vLLM 0.32 or newer, started by the run",
    ),
    "sleep": (
        "resources.colocated",
        "cannot sleep: vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 (0.32 or newer), "
        "SGLang needs --enable-memory-saver (0.5.23 or newer, on a GPU)",
    ),
}

# order, number, slot, session, servers to avoid
_Waiter = tuple[tuple[int, int], int, asyncio.Future[PooledServer], str, Collection[PooledServer]]


class SlotQueue:
    """Turns that wait for a slot on a server: the smallest `order` goes first (Engine.generate),
    then the earliest.

    A session has a home server, which caches its prefixes; it uses other servers while its home is
    full or loads weights, and gets a new home when the home is lost. Otherwise the least loaded
    server is chosen. A server that failed a turn gets it again only if no other one serves.
    """

    def __init__(self, servers: list[PooledServer]) -> None:
        self._servers = servers
        self._homes: OrderedDict[str, PooledServer] = OrderedDict()
        self._waiting: list[_Waiter] = []  # a heap
        self._num_came = 0

    @property
    def num_waiting(self) -> int:
        return sum(not slot.done() for _, _, slot, *_ in self._waiting)

    def seek(
        self, session: str, order: tuple[int, int] = (0, 0), avoid: Collection[PooledServer] = ()
    ) -> asyncio.Future[PooledServer]:
        """A future of a server with room, done if there is one now; it may be cancelled."""
        slot: asyncio.Future[PooledServer] = asyncio.get_running_loop().create_future()
        self._num_came += 1
        heappush(self._waiting, (order, self._num_came, slot, session, avoid))
        self.dispatch()
        return slot

    def free(self, server: PooledServer) -> None:
        """Return a slot of the server."""
        server.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Assign free slots to waiting turns; skips turns that avoid the free servers."""
        passed: list[_Waiter] = []
        while self._waiting:
            _, _, slot, session, avoid = self._waiting[0]
            if not slot.done():
                server = self._choose(session, avoid)
                if server is not None:
                    server.in_flight += 1
                    slot.set_result(server)
                elif avoid:
                    passed.append(self._waiting[0])
                else:
                    break
            heappop(self._waiting)
        for waiter in passed:
            heappush(self._waiting, waiter)

    def end(self, reason: str) -> None:
        """Fail all waiting turns with EngineDeadError."""
        while self._waiting:
            _, _, slot, *_ = self._waiting.pop()
            if not slot.done():
                slot.set_exception(EngineDeadError(reason))

    def _choose(self, session: str, avoid: Collection[PooledServer]) -> PooledServer | None:
        serving = [server for server in self._servers if server.serving]
        wanted = [server for server in serving if server not in avoid] if avoid else serving
        free = [server for server in wanted or serving if server.has_room]
        if not free:
            return None
        home = self._homes.get(session)
        if home in free:
            self._homes.move_to_end(session)
            return home
        chosen = min(free, key=lambda server: server.in_flight / server.limit.value)
        if home is None or home.is_out:
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return chosen


class EnginePool(TurnEngine[PooledServer]):
    """An Engine over servers. Call `start` before using it.

    `servers` are the members, whether or not they currently serve; `policy_version` is that of the
    last update that a server accepted; `reason` is set when the pool has ended.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        model_path: Path,
        policy_version: int,
        *,
        adapter: Path | None = None,
        config: PoolConfig | None = None,
        vocab_size: int,
        **options: Any,
    ) -> None:
        """`adapter`: the initial policy, on top of the model of `model_path`; `options`: see
        TurnEngine."""
        super().__init__(model_path, config=config, vocab_size=vocab_size, **options)
        self.servers: list[PooledServer] = []
        self.queue = SlotQueue(self.servers)
        self.dispatch = self.queue.dispatch
        self.policy_version = policy_version
        self.target = Target(adapter or model_path, policy_version)
        self.is_asleep = False
        self.reason: str | None = None
        self._keepers: dict[PooledServer, Keeper] = {}
        self._broadcast = Broadcast(self.config.broadcast_timeout_s)
        self._num_servers = 0  # so far, including removed ones
        self._updating = asyncio.Lock()
        self._returned = asyncio.Event()  # a server serves again, or the pool has ended
        self._is_out = False  # no server is available
        self._outage = WorkClock()  # runs meanwhile
        self._outage_timer: asyncio.TimerHandle | None = None  # ends the pool after a long outage
        for server in servers:
            self._enlist(server)

    # who takes part

    async def start(self, *, fresh: bool) -> None:
        """Connect to all servers. `fresh`: they were just started from `model_path`; otherwise they
        load it, where they can. Raises ConfigError if a server cannot be used, or none answers.
        Servers that are lost or full join later."""
        keepers = list(self._keepers.values())
        outcomes = await asyncio.gather(
            *(keeper.connect(self.target, fresh=fresh) for keeper in keepers),
            return_exceptions=True,
        )
        is_there = any(not isinstance(one, ServerLostError) for one in outcomes)
        found = list(zip(self.servers, outcomes, strict=True))
        for server, outcome in found:
            if is_there and isinstance(outcome, ServerLostError | BusyError):
                server.suspend(str(outcome))
            elif isinstance(outcome, EngineError):
                raise ConfigError(f"engine server {server.name}: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        for server, outcome in found:
            if outcome is None:
                self.serve(server)
            self._keepers[server].start()
        self.watch_outage()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and turn that every server can hold."""
        return min((s.max_model_len for s in self.servers if s.max_model_len), default=0)

    def require(self, feature: Feature) -> None:
        """See Engine.require; servers that never answered are skipped."""
        for server in self.servers:
            if server.epoch and feature not in server.features:
                key, lack = LACKS[feature]
                raise ConfigError(f"{key}: {server.name} {lack}")

    def add_server(self, client: Server) -> None:
        """Add a server, which serves once it has the current weights."""
        self.check_alive()
        self._keepers[self._enlist(client)].start()

    def remove_server(self, url: str) -> None:
        """Remove a server permanently; its running requests finish."""
        for server in list(self.servers):
            if server.client.url == url:
                self.servers.remove(server)
                server.suspend("it was removed from the pool")
        self.watch_outage()

    def _enlist(self, client: Server) -> PooledServer:
        server = PooledServer(client, self._num_servers, self.config, self.dispatch)
        self._num_servers += 1
        self.servers.append(server)
        self._keepers[server] = Keeper(self, server)
        return server

    def serve(self, server: PooledServer) -> None:
        """Let a server with the current weights serve."""
        server.serve()
        self._returned.set()
        self.watch_outage()

    def kept(self, keeper: Keeper) -> None:
        """Handle the end of a keeper, because its server left or by a failure."""
        del self._keepers[keeper.server]
        task = keeper.task
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a keeper of the engine pool failed", exc_info=error)
            self.end(f"a keeper of the engine pool failed: {error!r}")

    def check_alive(self) -> None:
        if self.reason is not None:
            raise EngineDeadError(self.reason)

    def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[PooledServer]
    ) -> asyncio.Future[PooledServer]:
        return self.queue.seek(session, order, avoid)

    def release(self, slot: PooledServer, outcome: Outcome) -> Outcome:
        outcome = self.settle(slot, outcome)
        self.queue.free(slot)
        return outcome

    def settle(self, server: PooledServer, outcome: Outcome, *, is_late: bool = False) -> Outcome:
        """See PooledServer.settle. Outcomes after the end of the pool are ignored."""
        if self.reason is None:
            outcome = server.settle(outcome, is_late=is_late)
            if isinstance(outcome, Lost):
                self.watch_outage()
        return outcome

    def has_room(self, num_live: int) -> bool:
        """Whether few turns wait for slots, and the caches have room for all trajectories at the
        current mean size."""
        serving = [server for server in self.servers if server.serving]
        room = sum(server.limit.value for server in serving)
        if not serving or self.queue.num_waiting > MAX_WAITING * room:
            return False
        running = sum(server.load.num_running for server in serving)
        usage = sum(server.load.kv_usage for server in serving)
        return running < MIN_RUNNING or usage / running * num_live <= FULL * len(serving)

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, within_s: float
    ) -> dict[str, Completion]:
        """See Engine.generate_on_each; not counted and not retried."""
        self.counts["probes"] += 1
        request = ServerRequest(f"{self.name}-probe-{self.counts['probes']}", prompt_ids, sampling)
        found: dict[str, Completion] = {}

        async def probe(server: PooledServer) -> None:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(within_s):
                    found[server.name] = await sampled(server.client, request)

        await asyncio.gather(*(probe(server) for server in self.servers if server.is_there))
        return found

    # weights

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Update every server; see Engine.load_weights.

        It returns when each server has the update or is out of the pool, and at least one has it. A
        returning server loads the update first, so `source` must exist until the next one. Sleeping
        servers wake up. Raises EngineError if none accepted it and the old weights are served, and
        EngineDeadError if all are lost.
        """
        await self._change(Target(source, policy_version))

    async def receive_weights(self, sender: Sender, policy_version: int) -> None:
        """Update every server by broadcast; otherwise as load_weights. A server that does not
        support it, or that failed, gets a directory that `sender` writes."""
        await self._change(Target(None, policy_version, sender))

    async def take_weights(self, shared: SharedSender, policy_version: int) -> None:
        """Update every server from shared memory of the learner, which is released as soon as all
        have read it; otherwise as receive_weights. Sleeping servers wake up."""
        await self._change(Target(None, policy_version, shared=shared))

    async def _change(self, target: Target) -> None:
        async with self._updating:
            self.check_alive()
            before, self.target, version = self.target, target, target.policy_version
            keepers = [self._keepers[server] for server in self.servers]
            if target.sender is not None:
                await self._broadcast.update(target.sender, target.policy_version, keepers)
            if target.shared is not None:
                await share_weights(target.shared, target.policy_version, keepers)
            refused = await self._update_all(keepers)
            if refused and not any(keeper.server.serves(version) for keeper in keepers):
                self.target = before
                self.dispatch()
                reasons = "; ".join(f"{server.name}: {e}" for server, e in refused.items())
                raise EngineError(f"no server took policy version {version}: {reasons}")
            await self._until_taken()
            self.policy_version = version
            self.counts["weight_updates"] += 1
            for server, error in refused.items():
                server.suspend(f"it refused policy version {version}: {error}")
            self.watch_outage()

    async def sleep(self) -> None:
        """Let all servers free their memory. Requests wait, without using retries, until `wake` or
        `load_weights`, which wakes them with new weights. Raises EngineError for a server that
        answers but does not sleep."""
        self.counts["sleeps"] += 1
        async with self._updating:
            self.check_alive()
            self.is_asleep = True
            outcomes = await asyncio.gather(
                *(self._keepers[server].sleep() for server in self.servers), return_exceptions=True
            )
            self.watch_outage()
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    async def wake(self) -> None:
        """Let all servers serve again with their old weights."""
        async with self._updating:
            self.check_alive()
            if self.is_asleep:
                await self._update_all([self._keepers[server] for server in self.servers])
                await self._until_taken()

    async def _update_all(self, keepers: list[Keeper]) -> dict[PooledServer, EngineError]:
        """The errors of servers that refused the target's weights, by server."""
        outcomes = await asyncio.gather(*(self._update(keeper) for keeper in keepers))
        self.is_asleep = False
        for keeper in keepers:
            keeper.server.check_due.set()
        self.watch_outage()
        found = zip(keepers, outcomes, strict=True)
        return {keeper.server: error for keeper, error in found if error is not None}

    async def _update(self, keeper: Keeper) -> EngineError | None:
        refusal = await keeper.update(self.target)
        if refusal is None and keeper.server.serving:  # else it may be about to be left
            self.serve(keeper.server)
        return refusal

    async def _until_taken(self) -> None:
        """If all servers are lost, wait until one returns with the new weights."""
        while not any(server.serves(self.target.policy_version) for server in self.servers):
            self.watch_outage()
            self._returned.clear()
            await self._returned.wait()
            self.check_alive()

    # outages, and the end

    @property
    def outage_s(self) -> float:
        """Total seconds in which no server was available or all slept; see
        agentenv/base/deadline.py."""
        return self._outage()

    def watch_outage(self) -> None:
        """Start or stop the clock of an outage, which runs while no server is available. The pool
        ends after a single outage of max_outage_s, unless the servers sleep."""
        out = self.reason is None and not any(server.is_there for server in self.servers)
        if out is not self._is_out:
            self._is_out = out
            (self._outage.go if out else self._outage.stop)()
        if out and not self.is_asleep and self._outage_timer is None:
            loop = asyncio.get_running_loop()
            self._outage_timer = loop.call_later(self.config.max_outage_s, self._end_outage)
        elif (not out or self.is_asleep) and self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None

    def _end_outage(self) -> None:
        reasons = [f"{server.name}: {server.reason}" for server in self.servers]
        self.end(
            f"no engine server was available for {self.config.max_outage_s:g} s: "
            f"{'; '.join(reasons) or 'all were removed'}"
        )

    def end(self, reason: str) -> None:
        """End the pool: running, waiting and later requests raise EngineDeadError."""
        self.reason = self.reason or reason
        self.watch_outage()
        self._returned.set()
        for server in self.servers:
            server.is_reported = True  # the pool's reason is reported instead
            server.drop(self.reason)
        self.queue.end(self.reason)

    async def close(self) -> None:
        """Abort running requests and drop the connections, even while being cancelled. The servers
        continue. Idempotent."""
        self.end("the engine pool is closed")
        await uncancelled(self._close())

    async def _close(self) -> None:
        servers = {*self.servers, *self._keepers}
        tasks = {keeper.task for keeper in self._keepers.values() if keeper.task is not None}
        requests = [request for server in servers for request in server.running]
        await cancel_all(tasks)
        if requests:
            await asyncio.wait(requests)
        await asyncio.gather(*(server.client.close() for server in servers))

    def stats(self) -> dict[str, float]:
        """Counters since the start, and metrics of each server as server/N/..., with N in the order
        of their addition."""
        names = (
            "requests sampled_tokens prompt_tokens cached_tokens retries reconnections "
            "continuations sleeps descriptor_waits weight_updates"
        )
        found: dict[str, float] = {name: self.counts[name] for name in names.split()}
        found["outage_s"] = self.outage_s
        found["pause_wait_s"] = max((one.client.pause_wait_s for one in self.servers), default=0.0)
        found["running"] = sum(server.in_flight for server in self.servers)
        found["waiting"] = self.queue.num_waiting
        found["servers"] = len(self.servers)
        found["servers_up"] = sum(server.is_there for server in self.servers)
        for server in self.servers:
            found |= {f"server/{server.number}/{k}": v for k, v in server.figures().items()}
        return found

    def account(self) -> dict[str, Any]:
        """The part of a run's summary: counters, metrics of each used server, and descriptions of
        faults.
        """
        lines = problems(self.servers)
        if waits := self.counts["descriptor_waits"]:
            lines.append(f"requests waited {waits} times for a file descriptor; raise ulimit -n")
        if self.outage_s >= 1.0:
            lines.append(f"no server was available, or all were asleep, for {self.outage_s:.0f} s")
        names = "requests retries reconnections continuations"
        return {
            **{name: self.counts[name] for name in names.split()},
            "outage_s": round(self.outage_s, 1),
            "servers": {server.name: server.summary() for server in self.servers},
            "told": lines,
        }
