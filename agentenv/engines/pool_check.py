"""Whether the servers of a pool hold the same weights under the same version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from agentenv.engines.server import Request, Server, ServerLostError
from agentenv.errors import EngineError
from agentenv.types import Completion, SamplingParams

PROBE = Request("", tuple(range(1, 17)), SamplingParams(max_tokens=1, temperature=0.0))
MAX_PROBE_GAP = 0.05  # nats; kernels of one engine differ by less, other weights by more
SHOWN = 3  # parameters that a message names


class WeightCheck:
    """Compares each server with the first one that took a version.

    Where an engine tells no checksums, the log-prob of the likeliest token behind a fixed prompt
    stands in for them.
    """

    def __init__(self, vocab_size: int) -> None:
        self._probe = replace(PROBE, prompt_ids=[i % vocab_size for i in PROBE.prompt_ids])
        self._num_probes = 0
        self._version: int | None = None
        self._reference = ""  # name of the first server
        self._checksums: dict[str, str] = {}
        self._logprob: float | None = None

    async def check(self, server: Server, policy_version: int) -> None:
        """Raises ServerLostError if the weights are not those of the version's first server."""
        checksums = await server.fingerprint()
        logprob = None if checksums else await self._ask(server)
        if self._version is not None and policy_version < self._version:
            return  # an update has come meanwhile
        if policy_version != self._version:
            self._version, self._reference = policy_version, server.name
            self._checksums, self._logprob = checksums, logprob
            return
        problem = self._compare(checksums, logprob)
        if problem:
            raise ServerLostError(
                f"{server.name} does not hold the weights of policy version {policy_version} "
                f"that {self._reference} has: {problem}"
            )

    async def unchanged(self, server: Server) -> bool:
        """Whether its checksums still are those of the current version; False where an engine
        tells none."""
        checksums = await server.fingerprint()
        return bool(checksums) and not self._compare(checksums, None)

    def _compare(self, checksums: dict[str, str], logprob: float | None) -> str:
        """What differs; empty for nothing."""
        if checksums and self._checksums:
            names = sorted(checksums.keys() | self._checksums.keys())
            wrong = [n for n in names if checksums.get(n) != self._checksums.get(n)]
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            return f"checksums of {', '.join(wrong[:SHOWN])}{more} differ" if wrong else ""
        if logprob is not None and self._logprob is not None:
            gap = abs(logprob - self._logprob)
            return f"log-probs differ by {gap:.3f} nats" if gap > MAX_PROBE_GAP else ""
        return ""

    async def _ask(self, server: Server) -> float:
        self._num_probes += 1
        probe = replace(self._probe, id=f"weights-{id(self):x}-{self._num_probes}")
        completion = await server.generate(probe, lambda chunk: None)
        return completion.logprobs[0]


async def ask_each(servers: Sequence[Server], request: Request) -> dict[str, Completion]:
    """The same request on all, by the server's name; what is lost or refused is left out."""
    outcomes = await asyncio.gather(
        *(server.generate(request, lambda chunk: None) for server in servers),
        return_exceptions=True,
    )
    found = {}
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, Completion):
            found[server.name] = outcome
        elif not isinstance(outcome, EngineError):
            raise outcome
    return found
