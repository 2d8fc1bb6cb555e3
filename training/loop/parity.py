"""The parity check: log-probs of published weights, by the engine and by the learner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from agentenv.assembly.keys.rl import TrainConfig, TrainingConfig
from agentenv.assembly.serving.gpus import trains_on_gpu
from agentenv.base.errors import SHOWN, LearnerError
from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.engine import Engine
from agentenv.learners.keys import Agreement, Metrics
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.encoded_tree import encode_sequence

logger = logging.getLogger(__name__)

PROBE_S = 120.0  # deadline of a server for a prompt of a probe; a late one is left out


CLOSE = 0.01  # maximum gap per token, nats, for the engine's log-probs to replace the learner's


class Gap(Struct, frozen=True):
    """|engine log-prob - learner log-prob| over the tokens of one probe, nats. `worst`: the server
    with the largest mean, `worst_mean`; empty without servers."""

    num_tokens: int
    mean: float
    max: float
    worst: str
    worst_mean: float


class ParityGap(Struct):
    """|engine log-prob - learner log-prob| on the probe batch, nats, over all publishes.
    `at_start`: the mean at version 0, when both have loaded the same file; None: not measured."""

    num_tokens: int = 0
    sum: float = 0.0
    max: float = 0.0
    at_start: float | None = None

    def add(self, gap: Gap) -> None:
        self.num_tokens += gap.num_tokens
        self.sum += gap.mean * gap.num_tokens
        self.max = max(self.max, gap.max)

    @property
    def mean(self) -> float:
        return self.sum / self.num_tokens if self.num_tokens else 0.0


@dataclass(eq=False)
class ParityProbe:
    """After a publish, the engine (each server of a pool) samples a few tokens for fixed prompts,
    as `sampling_at` says for its policy version. Before its next step the learner, still at that
    version, scores the same tokens."""

    engine: Engine
    learner: DeepSpeedLearner
    prompts: Sequence[list[int]]
    num_tokens: int = 16
    sampling_at: Callable[[int], SamplingParams] = lambda version: SamplingParams(1)

    def __post_init__(self) -> None:
        self._sampling: asyncio.Future[list[dict[str, Completion]]] | None = None

    def start(self) -> None:
        """Let the engine sample; call right after a publish."""
        given = self.sampling_at(self.engine.policy_version)
        self._params = replace(given, max_tokens=self.num_tokens, stop=())
        self._sampling = asyncio.gather(
            *(self._sample(number, prompt) for number, prompt in enumerate(self.prompts))
        )

    async def _sample(self, number: int, prompt: list[int]) -> dict[str, Completion]:
        """Completions by the name of the server; late servers are omitted."""
        sampling = replace(self._params, seed=number)
        return await self.engine.generate_on_each(prompt, sampling, PROBE_S)

    async def sampled(self) -> None:
        """Wait until the sampling of `start` has ended."""
        if self._sampling is not None:
            await asyncio.wait([self._sampling])

    async def finish(self) -> Gap | None:
        """Let the learner score the samples of `start`; None if there are none."""
        if self._sampling is None:
            return None
        found, self._sampling = await self._sampling, None
        sampled = [
            (name, prompt, completion)
            for prompt, answers in zip(self.prompts, found, strict=True)
            for name, completion in answers.items()
        ]
        if not sampled:  # no server answered
            return None
        sequences = [
            encode_sequence(
                prompt + completion.token_ids,
                [False] * len(prompt) + [True] * len(completion.token_ids),
                self._params.temperature,
                num_kept=completion.num_kept,
                kept_ids=completion.kept_ids,
            )
            for _, prompt, completion in sampled
        ]
        scores = await self.learner.score(sequences)
        gaps = [
            (abs(ours - theirs), name)
            for (name, _, completion), score in zip(sampled, scores, strict=True)
            for ours, theirs in zip(completion.logprobs, score.logprobs, strict=True)
        ]
        of_server: dict[str, list[float]] = {}
        for gap, name in gaps:
            of_server.setdefault(name, []).append(gap)
        worst_mean, worst = max((fmean(found), name) for name, found in of_server.items())
        mean, largest = fmean(gap for gap, _ in gaps), max(gaps)[0]
        return Gap(len(gaps), mean, largest, worst, worst_mean)

    async def close(self) -> None:
        """Stop the sampling, if it is still running."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)


class ParityCheck:
    """Checks the gaps that the probe measures against the limits; `total` sums them up."""

    def __init__(self, config: TrainConfig, probe: ParityProbe, total: ParityGap) -> None:
        self.train = config.train
        self.in_float32 = computes_in_float32(config)
        self.probe = probe
        self.total = total
        self.is_exact = is_exact(config)
        self.agreement: Agreement = "exact" if self.is_exact else "unknown"

    async def check(self) -> Metrics:
        """The gap of the last probe, as metrics. Warns if it exceeds `train.max_logprob_gap`;
        raises LearnerError above `train.stop_logprob_gap`."""
        gap = await self.probe.finish()
        if gap is None:
            return {}
        self.total.add(gap)
        if not self.is_exact:
            self.agreement = "close" if gap.max <= CLOSE else "unknown"
        allowed, stop = gap_limits(self.train, self.in_float32, self.total.at_start)
        version = self.probe.learner.policy_version
        if gap.worst_mean > stop:
            raise LearnerError(
                f"{gap.worst or 'the engine'} and the learner disagree by {gap.worst_mean:.2g} "
                f"nats a token at policy version {version}, more than train.stop_logprob_gap = "
                f"{stop:g}: they do not compute the same model; check for a different dtype, "
                "quantization or model path, or a server with log-probs before temperature"
            )
        if gap.worst_mean > allowed:
            text = (
                "%s and learner disagree by %.4f nats a token, up to %.4f, at policy version %d "
                "(train.max_logprob_gap = %g)"
            )
            worst = gap.worst or "engine"
            logger.warning(text, worst, gap.worst_mean, gap.max, version, allowed, extra=SHOWN)
        if version == 0:
            self.total.at_start = gap.worst_mean
        return {"parity/logprob_gap_mean": gap.mean, "parity/logprob_gap_max": gap.max}


def gap_limits(
    train: TrainingConfig, in_float32: bool, at_start: float | None = None
) -> tuple[float, float]:
    """Mean gaps between engine and learner, nats, above which a run warns and above which it ends.

    bfloat16 differs from float32 by 0.033 to 0.044 nats on average, and by up to 0.25, at 0.44 to
    0.6 billion weights (tests/gpu/RESULTS.md). Other models differ more, so the limits also scale
    with the gap at version 0, `at_start`, if it is known.
    """
    warn, stop = (0.01, 0.1) if in_float32 else (0.1, 0.3)
    if at_start is not None:
        warn, stop = max(0.01, 3 * at_start), max(stop, 6 * at_start)
    warn = train.max_logprob_gap or warn
    return warn, max(train.stop_logprob_gap or stop, warn)


def computes_in_float32(config: TrainConfig) -> bool:
    """Whether learner and engine compute in float32, according to the configuration."""
    engine = config.engine.local_model or config.engine.launched
    learner = config.learner.resolved(on_gpu=trains_on_gpu(config))
    dtypes = {learner.dtype, "model" if engine is None else engine.dtype}
    return dtypes <= {"float32", "model"}


def is_exact(config: TrainConfig) -> bool:
    """Whether the engine's log-probs equal the learner's up to rounding in float32. In bfloat16
    they do not: engine and learner round at different places."""
    if config.engine.local_model is None:
        return config.engine.capabilities.is_exact
    return config.engine.capabilities.is_exact and computes_in_float32(config)
