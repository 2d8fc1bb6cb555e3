"""Many engine servers as one engine; one server is a pool of one.

generate() --> home server of its session, or the least loaded one with room --> Turn
    ^                                                                             |
    +-- server lost: the next part, from the tokens received so far, elsewhere <--+
    +-- connection broken off: the same, once, on the same server <---------------+
    +-- server full: the same part, before all others who wait for a place <------+

Versions: a request that starts after an update never goes to a server with older weights, even if
no other is left; it waits for one that has caught up, within `max_outage_s`. Otherwise an update
that a single server missed would break the bound on staleness. Requests that run on a server that
refused an update go on there, under the versions that they report.

EnginePool (here)  calls of generate, one part of a turn after the other
Fleet, Places      the servers, their keepers and updates, and who gets a place (fleet.py)
Member             the state of one server (member.py)
Turn               what is known of one turn (turn.py)
Broadcast          the controller's part of weights by broadcast (broadcast.py)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agentenv.deadline import doing, waiting
from agentenv.engines.pool.account import told
from agentenv.engines.pool.fleet import Fleet
from agentenv.engines.pool.member import Hearing, Member, Target
from agentenv.engines.pool.turn import EntropyKind, Turn
from agentenv.engines.server import (
    BrokenConnectionError,
    BrokenOffError,
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    Request,
    Server,
    ServerLostError,
    SilentError,
)
from agentenv.engines.server_config import PoolConfig
from agentenv.engines.stop_strings import StopStrings
from agentenv.engines.weights import Sender
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams

NO_DESCRIPTOR_S = 0.25  # between two tries of a request that finds no file descriptor
FIRST = (-1, 0)  # the order of a turn that a full server has refused
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
        self._name = name
        self._seed = seed
        self._eos_ids = frozenset(eos_ids)
        self._entropies = entropies
        self._stop_strings = StopStrings(model_path, vocab_size)
        target = Target(adapter or model_path, policy_version)
        self._fleet = Fleet(servers, target, self.config, vocab_size)
        self._counts: Counter[str] = Counter()
        self._entropy_kind: EntropyKind = "top_k"  # of the last part that came to its end

    async def start(self, *, fresh: bool) -> None:
        """Connect to all servers. `fresh`: they were just started from `model_path`; others are
        made to load it, where they can. Raises ConfigError if one cannot be used, or none is
        there; one that comes later takes part from then on."""
        await self._fleet.start(fresh=fresh)

    @property
    def policy_version(self) -> int:
        """Version of the last update that a server took."""
        return self._fleet.version

    @property
    def outage_s(self) -> float:
        """Seconds so far in which no server was there or all slept; see agentenv/deadline.py."""
        return self._fleet.outage_s

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and turn that every server can hold."""
        return min((m.max_model_len for m in self._fleet.members if m.max_model_len), default=0)

    def add_server(self, server: Server) -> None:
        """Let one more take part; it serves once it holds the current weights."""
        self._fleet.add(server)

    def remove_server(self, name: str) -> None:
        """Take one out for good; what runs on it ends there."""
        self._fleet.remove(name)

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
        self._fleet.check_alive()
        if stream_interval < 1:
            raise EngineError(f"stream_interval must be at least 1, found {stream_interval}")
        matcher = await self._stop_strings.ready(sampling.stop)
        window = stream_interval if on_tokens is not None else 0
        turn = Turn(
            prompt_ids,
            sampling,
            on_tokens,
            stream_interval,
            self._eos_ids,
            matcher,
            num_entropies=window if self._entropies == "window" else None,
        )
        self._counts["requests"] += 1
        key, retries = f"{self._seed}/{self._counts['requests']}", 0
        failed: set[Member] = set()  # servers that have lost a part
        while True:
            done, problem = await self._part(turn, session, order, failed)
            if done is not None:
                return done
            self._counts["continuations"] += bool(turn.token_ids)
            if turn.was_starved:
                turn.was_starved = False
                with waiting("a free file descriptor"):
                    await asyncio.sleep(NO_DESCRIPTOR_S)
            if not problem:
                continue
            if retries == self.config.max_retries:
                raise EngineError(f"a turn was given up after {retries + 1} attempts: {problem}")
            retries += 1
            self._counts["retries"] += 1
            with waiting("a break before another server is asked"):
                await asyncio.sleep(self.config.backoff_s(retries, key))

    async def _part(
        self, turn: Turn, session: str, order: tuple[int, int], failed: set[Member]
    ) -> tuple[Completion | None, str]:
        """Let one server sample. The turn if it is done by then; else what went wrong, which is
        empty where no retry is used up. `failed`: servers that are avoided, which are added to.
        Raises what a server refuses."""
        self._fleet.check_alive()
        with waiting("a place on a server"):
            place = FIRST if turn.was_refused else order
            member = await self._fleet.places.acquire(session, place, failed)
        turn.was_refused = False
        try:
            if member.asleep:  # since the place was given
                raise BrokenOffError(member.reason)
            part = await self._attempt(member, turn, session)
            while part is not None and turn.ends_window(part):
                done = turn.lose(part, part.entropy_kind)
                if done is not None:
                    return done, ""
                part = await self._attempt(member, turn, session)
        except BusyError as error:
            self._fleet.check_alive()
            try:
                self._fleet.refuse(member, error)
            except ServerLostError as lost:
                self._fleet.lose(member, lost)
                return None, str(lost)
            turn.was_refused = True
            return None, ""
        except NoDescriptorError:
            self._counts["descriptor_waits"] += 1
            turn.was_starved = turn.was_refused = True
            return None, ""
        except BrokenOffError:
            self._counts["broken_off"] += 1
            return turn.lose(None, self._entropy_kind), ""
        except ForeignWeightsError as error:
            self._fleet.lose(member, error)
            turn.discard(error)
            return None, str(error)
        except ServerLostError as error:
            self._fleet.check_alive()
            if isinstance(error, BrokenConnectionError) and not turn.breaks_again():
                self._counts["reconnections"] += 1
                member.account.lose(error.kind, str(error))
                member.look()  # it may be dead, or another process by now
                return turn.lose(None, self._entropy_kind), ""
            failed.add(member)
            self._fleet.lose(member, error)
            return turn.lose(None, self._entropy_kind), str(error)
        finally:
            self._fleet.places.release(member)
        if part is None:
            return turn.cut(self._entropy_kind), ""
        self._entropy_kind = part.entropy_kind
        self._counts["cached_tokens"] += part.num_cached_tokens
        if part.finish_reason == "abort":
            failed.add(member)
            return turn.lose(part, part.entropy_kind), f"{member.name} aborted the request"
        member.answered()
        return turn.complete(part), ""

    async def _attempt(self, member: Member, turn: Turn, session: str) -> Completion | None:
        """One request on one server; None if it ended in a stop string that only the turn sees."""
        self._counts["attempts"] += 1
        request = turn.request(f"{self._name}-{self._counts['attempts']}", session)
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        member.counts["requests"] += 1
        hearing, began_s = member.hear(), asyncio.get_running_loop().time()
        receive = partial(self._receive, member, turn, hearing)
        attempt = asyncio.create_task(member.server.generate(request, receive))
        member.attempts[attempt] = hearing
        problem: BaseException | None = None
        try:
            watched: set[asyncio.Future[Any]] = {attempt, turn.stopped}
            with doing(member.doing):
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.wait({attempt})
            del member.attempts[attempt]
            hearing.end()
            problem = None if attempt.cancelled() else attempt.exception()
        if turn.stopped.done():
            return None
        if member.asleep and (attempt.cancelled() or problem is not None):
            raise BrokenOffError(member.reason)
        if attempt.cancelled() or isinstance(problem, ServerLostError | ForeignWeightsError):
            hearing.work.give_back()
        if attempt.cancelled() and hearing.problem:
            raise SilentError(f"{member.name}: {hearing.problem}")
        if attempt.cancelled():
            raise ServerLostError(f"{member.name}: {member.reason}")
        if problem is not None:
            raise problem
        part = attempt.result()
        seconds = asyncio.get_running_loop().time() - began_s
        member.account.answer(len(part.token_ids), seconds)
        return part

    def _receive(self, member: Member, turn: Turn, hearing: Hearing, chunk: Chunk) -> None:
        hearing.heard()
        self._counts["sampled_tokens"] += len(chunk.token_ids)
        member.counts["sampled_tokens"] += len(chunk.token_ids)
        if member.on_trial:
            member.on_trial = False
            self._fleet.places.dispatch()
        turn.receive(chunk, member.server.policy_version)

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, within_s: float
    ) -> dict[str, Completion]:
        """One request on every server that serves, by the server's name; what is lost, refused or
        not there within so many seconds is left out. For measuring: it is not counted and not
        sent again."""
        self._counts["probes"] += 1
        request = Request(f"{self._name}-probe-{self._counts['probes']}", prompt_ids, sampling)
        serving = [member for member in self._fleet.members if member.is_there]

        async def ask(member: Member) -> Completion:
            async with asyncio.timeout(within_s):
                return await member.server.generate(request, lambda chunk: None)

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
        await self._fleet.load_weights(Target(source, policy_version))

    async def receive_weights(self, sender: Sender, policy_version: int) -> None:
        """Update every server by broadcast; otherwise like load_weights. A server that cannot, or
        that failed, gets a directory that `sender` writes."""
        await self._fleet.load_weights(Target(None, policy_version, sender))

    async def sleep(self) -> None:
        """Let all servers give their memory back. What runs, and what comes, waits without using
        up retries until `wake` or `load_weights`, which wakes them with other weights. Raises
        EngineError for a server that is there but does not sleep."""
        self._counts["sleeps"] += 1
        await self._fleet.sleep()

    async def wake(self) -> None:
        """Let all serve again with the weights that they had."""
        await self._fleet.wake()

    def require(self, feature: Literal["adapters", "broadcast", "sleep"]) -> None:
        """Raises ConfigError for a server without a feature that the configuration asks for; of
        one that was never there nothing is known."""
        key, lack = LACKS[feature]
        for member in self._fleet.members:
            if member.epoch and feature not in member.features:
                raise ConfigError(f"{key}: {member.name} {lack}")

    def has_room(self, num_live: int) -> bool:
        """Whether another tree should begin beside so many trajectories that are under way; see
        Fleet.has_room."""
        return self._fleet.has_room(num_live)

    # figures, and the end

    def stats(self) -> dict[str, float]:
        """Counters since the start, and figures of each server as server/N/..., N in the order in
        which they were named."""
        names = (
            "requests sampled_tokens prompt_tokens cached_tokens retries reconnections "
            "continuations sleeps descriptor_waits"
        )
        found: dict[str, float] = {name: self._counts[name] for name in names.split()}
        members = self._fleet.members
        found["weight_updates"] = self._fleet.num_updates
        found["outage_s"] = self.outage_s
        found["running"] = sum(member.in_flight for member in members)
        found["waiting"] = self._fleet.places.num_waiting
        found["servers"] = len(members)
        found["servers_up"] = sum(member.is_there for member in members)
        for member in members:
            found |= {f"server/{member.number}/{k}": v for k, v in member.figures().items()}
        return found

    def account(self) -> dict[str, Any]:
        """What befell its servers since the start, for a summary: counters, figures of each that
        takes part, and `told`, sentences for a person."""
        accounts = [member.account for member in self._fleet.members]
        lines = told(accounts)
        if waits := self._counts["descriptor_waits"]:
            lines.append(f"requests waited {waits} times for a file descriptor; raise ulimit -n")
        if self.outage_s >= 1.0:
            lines.append(f"no server was there, or all slept, for {self.outage_s:.0f} s")
        names = ("requests", "retries", "reconnections", "continuations")
        return {
            **{name: self._counts[name] for name in names},
            "outage_s": round(self.outage_s, 1),
            "servers": {one.name: one.figures() for one in accounts},
            "told": lines,
        }

    async def close(self) -> None:
        """Abort what runs and drop the connections. Idempotent; the servers go on."""
        self._fleet.end("the engine pool is closed")
        await self._fleet.close()
