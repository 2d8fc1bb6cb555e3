"""The parity probe: engine and learner must agree on the log-probs of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from agentenv.engine import Engine
from agentenv.engines.pool import EnginePool
from agentenv.types import Completion, SamplingParams
from learners.encoding import encode_sequence
from learners.learner import Learner


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
