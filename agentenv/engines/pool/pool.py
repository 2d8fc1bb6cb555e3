"""Many engine servers as one engine; one server is a pool of one.

Versions: a request that starts after an update never goes to a server with older weights, even if
no other is left; it waits for one that has caught up, within `max_outage_s`. Otherwise an update
that a single server missed would break the bound on staleness. Requests that run on a server that
refused an update go on there, under the versions that they report.

EnginePool (here)  calls of generate, updates of the weights, figures
PoolClient         one part of a turn after the other, each on a server (client.py)
Fleet, Places      the servers, their keepers and updates, and who gets a place (fleet.py)
Member             the state of one server (member.py)
Turn               what is known of one turn (turn.py)
Broadcast          the controller's part of weights by broadcast (broadcast.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from agentenv.engines.pool.client import PoolClient
from agentenv.engines.pool.fleet import Fleet
from agentenv.engines.pool.server_state import Member, Target
from agentenv.engines.pool.stats import told
from agentenv.engines.remote.server import Request, Server, sampled
from agentenv.engines.remote.weights import Sender
from agentenv.errors import ConfigError, EngineError
from agentenv.server_config import PoolConfig
from agentenv.types import Chunk, Completion, SamplingParams

# By feature: the key that asks for it, and what a server lacks that has not got it.
LACKS = {
    "adapters": (
        'engine.lora = "adapter"',
        "loads no adapters: vLLM needs --enable-lora, --max-lora-rank and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    ),
    "broadcast": (
        'engine.weights = "broadcast"',
        'takes none: vLLM needs --weight-transfer-config \'{"backend": "nccl"}\', SGLang needs '
        "0.5.23 or newer",
    ),
    "sleep": (
        "resources.colocated",
        "cannot sleep: vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 (0.32 or newer), "
        "SGLang needs --enable-memory-saver (0.5.23 or newer, on a GPU)",
    ),
}


class EnginePool:
    """An Engine over servers. `start` must have returned before it is used.

    `name` begins the ids of its requests and must be unique among the users of a server.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        model_path: Path,
        policy_version: int,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        config: PoolConfig | None = None,
        name: str = "agentenv",
        seed: int | str = 0,
        adapter: Path | None = None,
        entropies: Literal["all", "window"] = "all",
    ) -> None:
        """`adapter`: what the policy is at first, on top of the model of `model_path`. With
        `entropies` "window" only the tokens of a listener's first chunk have them."""
        self.config = config or PoolConfig()
        target = Target(adapter or model_path, policy_version)
        self.fleet = Fleet(servers, target, self.config, vocab_size)
        self.client: PoolClient[Member] = PoolClient(
            self.fleet,
            model_path,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            config=self.config,
            name=name,
            seed=seed,
            entropies=entropies,
        )

    async def start(self, *, fresh: bool) -> None:
        """Connect to all servers. `fresh`: they were just started from `model_path`; others are
        made to load it, where they can. Raises ConfigError if one cannot be used, or none is
        there; one that comes later takes part from then on."""
        await self.fleet.start(fresh=fresh)

    @property
    def policy_version(self) -> int:
        """Version of the last update that a server took."""
        return self.fleet.version

    @property
    def outage_s(self) -> float:
        """Seconds so far in which no server was there or all slept; see agentenv/deadline.py."""
        return self.fleet.outage_s

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and turn that every server can hold."""
        return min((m.max_model_len for m in self.fleet.members if m.max_model_len), default=0)

    def add_server(self, server: Server) -> None:
        """Add a server, which serves once it holds the current weights."""
        self.fleet.add(server)

    def remove_server(self, name: str) -> None:
        """Take the server of this name out for good; what runs on it ends there."""
        self.fleet.remove(name)

    # turns

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """Sample one turn; see Engine.generate. A server that is lost costs no token."""
        return await self.client.generate(
            prompt_ids,
            sampling,
            session=session,
            on_tokens=on_tokens,
            stream_interval=stream_interval,
            order=order,
        )

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, within_s: float
    ) -> dict[str, Completion]:
        """One request on every server that serves, by the server's name; what is lost, refused or
        not there within so many seconds is left out. For measuring: it is not counted and not
        sent again."""
        self.client.counts["probes"] += 1
        request = Request(
            f"{self.client.name}-probe-{self.client.counts['probes']}", prompt_ids, sampling
        )
        serving = [member for member in self.fleet.members if member.is_there]

        async def ask(member: Member) -> Completion:
            async with asyncio.timeout(within_s):
                return await sampled(member.server, request)

        outcomes = await asyncio.gather(*map(ask, serving), return_exceptions=True)
        found = {}
        for member, outcome in zip(serving, outcomes, strict=True):
            if isinstance(outcome, Completion):
                found[member.name] = outcome
            elif not isinstance(outcome, EngineError | TimeoutError):
                raise outcome
        return found

    # weights

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Update every server; see Engine.load_weights.

        It returns when each server has taken the update or is out of the pool, and one has it. A
        server that comes back loads the update first, so `source` must stay until the next one.
        Raises EngineError if none took it and the old weights are served, EngineDeadError if all
        are gone.
        """
        await self.fleet.load_weights(Target(source, policy_version))

    async def receive_weights(self, sender: Sender, policy_version: int) -> None:
        """Update every server by broadcast; otherwise like load_weights. A server that cannot, or
        that failed, gets a directory that `sender` writes."""
        await self.fleet.load_weights(Target(None, policy_version, sender))

    async def sleep(self) -> None:
        """Let all servers give their memory back. What runs, and what comes, waits without using
        up retries until `wake` or `load_weights`, which wakes them with other weights. Raises
        EngineError for a server that is there but does not sleep."""
        self.client.counts["sleeps"] += 1
        await self.fleet.sleep()

    async def wake(self) -> None:
        """Let all servers serve again, with the weights that they had."""
        await self.fleet.wake()

    def require(self, feature: Literal["adapters", "broadcast", "sleep"]) -> None:
        """Raises ConfigError for a server without a feature that the configuration asks for; of
        one that was never there nothing is known."""
        key, lack = LACKS[feature]
        for member in self.fleet.members:
            if member.epoch and feature not in member.features:
                raise ConfigError(f"{key}: {member.name} {lack}")

    def has_room(self, num_live: int) -> bool:
        """Whether another tree should begin beside so many trajectories that are under way; see
        Fleet.has_room."""
        return self.fleet.has_room(num_live)

    # figures, and the end

    def stats(self) -> dict[str, float]:
        """Counters since the start, and figures of each server as server/N/..., N in the order in
        which they were named."""
        names = (
            "requests sampled_tokens prompt_tokens cached_tokens retries reconnections "
            "continuations sleeps descriptor_waits"
        )
        found: dict[str, float] = {name: self.client.counts[name] for name in names.split()}
        members = self.fleet.members
        found["weight_updates"] = self.fleet.num_updates
        found["outage_s"] = self.outage_s
        found["running"] = sum(member.in_flight for member in members)
        found["waiting"] = self.fleet.places.num_waiting
        found["servers"] = len(members)
        found["servers_up"] = sum(member.is_there for member in members)
        for member in members:
            found |= {f"server/{member.number}/{k}": v for k, v in member.figures().items()}
        return found

    def account(self) -> dict[str, Any]:
        """What befell the servers since the start, for a summary: counters, figures of each that
        takes part, and `told`, sentences for a person."""
        accounts = [member.account for member in self.fleet.members]
        lines = told(accounts)
        if waits := self.client.counts["descriptor_waits"]:
            lines.append(f"requests waited {waits} times for a file descriptor; raise ulimit -n")
        if self.outage_s >= 1.0:
            lines.append(f"no server was there, or all slept, for {self.outage_s:.0f} s")
        names = ("requests", "retries", "reconnections", "continuations")
        return {
            **{name: self.client.counts[name] for name in names},
            "outage_s": round(self.outage_s, 1),
            "servers": {one.name: one.figures() for one in accounts},
            "told": lines,
        }

    async def close(self) -> None:
        """Abort what runs and drop the connections. Idempotent; the servers go on."""
        self.fleet.end("the engine pool is closed")
        await self.fleet.close()
