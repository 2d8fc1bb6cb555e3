"""What a run remembers beside the learner's own state; saved with every checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from agentenv.engine import Engine
from agentenv.engines.pool.pool import EnginePool
from agentenv.metrics import EntropyProfile, Ledger, num_tool_calls
from agentenv.tree import TrajectoryTree
from agentenv.types import Completion, SamplingParams
from launchers.evaluation.figures import Report
from learners.batch import encode_sequence
from learners.learner import Learner

# The parity probe: engine and learner must agree on the log-probs of the same weights.


class Gap(Struct, frozen=True):
    """|engine log-prob - learner log-prob| over the tokens of one probe, nats; `worst` is the
    server that has the largest, empty without servers."""

    num_tokens: int
    mean: float
    max: float
    worst: str = ""


class ParityProbe:
    """After a publish the engine, each server of a pool, samples a few tokens behind fixed
    prompts; before its next step the learner, still at that version, scores the same tokens."""

    def __init__(
        self, engine: Engine, learner: Learner, prompts: Sequence[list[int]], num_tokens: int = 16
    ) -> None:
        self.engine = engine
        self.learner = learner
        self.prompts = prompts
        self.num_tokens = num_tokens
        self._sampling: asyncio.Future[list[dict[str, Completion]]] | None = None

    def start(self) -> None:
        """Let the engine sample; call right after a publish."""
        self._sampling = asyncio.gather(
            *(self._sample(number, prompt) for number, prompt in enumerate(self.prompts))
        )

    async def _sample(self, number: int, prompt: list[int]) -> dict[str, Completion]:
        """By the name of the server."""
        sampling = SamplingParams(self.num_tokens, seed=number)
        if isinstance(self.engine, EnginePool):
            return await self.engine.generate_on_each(prompt, sampling)
        return {"": await self.engine.generate(prompt, sampling, session=f"probe{number}")}

    async def settle(self) -> None:
        """Wait until the engine has sampled what `start` asked for."""
        if self._sampling is not None:
            await asyncio.wait([self._sampling])

    async def finish(self) -> Gap | None:
        """Let the learner score what was sampled since start(); None if nothing was."""
        if self._sampling is None:
            return None
        found, self._sampling = await self._sampling, None
        sampled = [
            (name, prompt, completion)
            for prompt, answers in zip(self.prompts, found, strict=True)
            for name, completion in answers.items()
        ]
        if not sampled:  # no server was there
            return None
        sequences = [
            encode_sequence(
                prompt + completion.token_ids,
                [False] * len(prompt) + [True] * len(completion.token_ids),
            )
            for _, prompt, completion in sampled
        ]
        scores = await self.learner.score(sequences)
        gaps = [
            (abs(ours - theirs), name)
            for (name, _, completion), score in zip(sampled, scores, strict=True)
            for ours, theirs in zip(completion.logprobs, score.logprobs, strict=True)
        ]
        largest, worst = max(gaps)
        return Gap(len(gaps), sum(gap for gap, _ in gaps) / len(gaps), largest, worst)

    async def close(self) -> None:
        """Stop sampling, if it is still going on."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)


class Totals(Struct):
    """Sums over all trees that were delivered to the learner."""

    tool_calls: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    sft_tokens: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    num_trees: int = 0

    def add(self, trees: list[TrajectoryTree], learner_version: int) -> None:
        for tree in trees:
            staleness = learner_version - tree.oldest_version()
            self.tool_calls += num_tool_calls(tree)
            self.forks += tree.num_forks
            self.sampled_tokens += tree.num_action_tokens
            self.staleness_max = max(self.staleness_max, staleness)
            self.staleness_sum += staleness
            self.num_trees += 1


class ParityGap(Struct):
    """|engine log-prob - learner log-prob| on the probe batch, nats, over all publishes."""

    num_tokens: int = 0
    sum: float = 0.0
    max: float = 0.0

    def add(self, gap: Gap) -> None:
        self.num_tokens += gap.num_tokens
        self.sum += gap.mean * gap.num_tokens
        self.max = max(self.max, gap.max)

    @property
    def mean(self) -> float:
        return self.sum / self.num_tokens if self.num_tokens else 0.0


class Evaluating(Struct, frozen=True):
    """An evaluation of these sets that overlaps the training; its weights, which the given start
    of the process made, are in the run's folder until it is done."""

    step: int
    policy_version: int
    sets: list[str]
    incarnation: int = 0


class RunState(Struct):
    """`step` updates are done; `position` trees were delivered, in start order; `incarnation`
    counts starts of the process. Reports are kept by phase (before_sft, after_sft, after_rl);
    `entropy` is of all delivered trees; `evaluating` is an evaluation beside the
    training that is not done."""

    step: int = 0
    position: int = 0
    incarnation: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    totals: Totals = field(default_factory=Totals)
    parity: ParityGap = field(default_factory=ParityGap)
    entropy: EntropyProfile = EntropyProfile()
    reports: dict[str, dict[str, Report]] = field(default_factory=dict)
    best: float | None = None
    evaluating: Evaluating | None = None
    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def settled(self) -> RunState:
        """The state for a checkpoint: trees in flight are not offered yet, since a resumed run
        offers them again."""
        ledger = self.ledger
        delivered = ledger.trained + ledger.filtered + sum(ledger.failed.values())
        return replace(self, ledger=replace(ledger, offered=delivered))


class Throughput:
    """Tokens that the engine sampled a second, between one call of `rate` and the next."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def rate(self, stats: dict[str, float]) -> float:
        now = (asyncio.get_running_loop().time(), stats["sampled_tokens"])
        before, self._before = self._before or now, now
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds if seconds else 0.0
