"""The parity probe: engine and learner must agree on the log-probs of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from agentenv.engine import Engine
from agentenv.types import Completion, SamplingParams
from learners.encoding import encode_sequence
from learners.learner import Learner


class Gap(Struct, frozen=True):
    """|engine log-prob - learner log-prob| over the tokens of one probe, nats."""

    num_tokens: int
    mean: float
    max: float


class ParityProbe:
    """After a publish the engine samples a few tokens behind fixed prompts; before its next step
    the learner, still at that version, scores the same tokens."""

    def __init__(
        self, engine: Engine, learner: Learner, prompts: Sequence[list[int]], num_tokens: int = 16
    ) -> None:
        self.engine = engine
        self.learner = learner
        self.prompts = prompts
        self.num_tokens = num_tokens
        self._sampling: asyncio.Future[list[Completion]] | None = None

    def start(self) -> None:
        """Let the engine sample; call right after a publish."""
        self._sampling = asyncio.gather(
            *(
                self.engine.generate(
                    prompt, SamplingParams(self.num_tokens, seed=number), session=f"probe{number}"
                )
                for number, prompt in enumerate(self.prompts)
            )
        )

    async def finish(self) -> Gap | None:
        """Let the learner score what was sampled since start(); None if nothing was."""
        if self._sampling is None:
            return None
        completions, self._sampling = await self._sampling, None
        sequences = [
            encode_sequence(
                prompt + completion.token_ids,
                [False] * len(prompt) + [True] * len(completion.token_ids),
            )
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
        scores = await self.learner.score(sequences)
        gaps = [
            abs(ours - theirs)
            for completion, score in zip(completions, scores, strict=True)
            for ours, theirs in zip(completion.logprobs, score.logprobs, strict=True)
        ]
        return Gap(len(gaps), sum(gaps) / len(gaps), max(gaps))

    async def close(self) -> None:
        """Stop sampling, if it is still going on."""
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
