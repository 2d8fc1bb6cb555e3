"""A deterministic engine for tests and dry runs: replies come from a function instead of a model.

It implements the whole contract (streaming, stop strings, limits, versions, abort). Under a virtual
clock, two runs with one seed are bitwise equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar

from agentenv.base.config import about
from agentenv.base.errors import ConfigError, EngineDeadError, named
from agentenv.base.model_files import num_positions, read_eos_ids, read_model_config
from agentenv.base.offload import in_thread
from agentenv.base.registry import loaded
from agentenv.base.types import Chunk, Completion, SamplingParams, VersionSpan
from agentenv.contract import engine as contract

Script = Callable[[str, Random], str]


class ScriptedConfig(
    contract.EngineConfig, frozen=True, kw_only=True, tag="scripted", tag_field="name"
):
    """Configuration of the scripted engine."""

    # no model could differ
    capabilities: ClassVar = contract.EngineCapabilities(is_exact=True, has_temperature=True)

    script: Annotated[
        str, about("'module:function' called with (prompt text, Random), returns the turn")
    ] = "agentenv.envs.quickstart:scripted_turn"
    max_model_len: Annotated[int, about("tokens of prompt and turn", ge=1)] = 4096
    tokens_per_s: Annotated[float, about("sampling speed of one request; 0 is unlimited", ge=0)] = (
        0.0
    )
    latency_s: Annotated[float, about("latency of a turn's first token", ge=0)] = 0.0

    def max_context(self, model: Path) -> int:
        """The configured context, even if the model's is longer."""
        of_model = num_positions(read_model_config(model))
        return min(self.max_model_len, of_model or self.max_model_len)

    async def start(self, given: contract.EngineStart) -> ScriptedEngine:
        eos_ids = await in_thread(read_eos_ids, given.model, given.tokenizer)
        engine = ScriptedEngine(
            self, given.tokenizer, policy_version=given.policy_version, eos_ids=eos_ids
        )
        given.stack.push_async_callback(engine.close)
        return engine


class ScriptedEngine(contract.Engine):
    """An engine whose turns come from `script` (or from the function that the config names).

    Log-probabilities and entropies are pseudo-random, from the request's seed. A turn that does not
    end with a stop string gets the tokenizer's end-of-sequence token, or the first of `eos_ids`.
    """

    policy_version = 0

    def __init__(
        self,
        config: ScriptedConfig,
        tokenizer: Any,
        *,
        script: Script | None = None,
        policy_version: int = 0,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self.script = script or _load_script(config.script)
        self.policy_version = policy_version
        self._closed = False
        self._running = 0
        self._stats = {"requests": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}

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
        if self._closed:
            raise EngineDeadError("the scripted engine was closed")
        contract.check_request(prompt_ids, sampling, len(self.tokenizer), self.config.max_model_len)
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(prompt_ids)
        rng = Random(f"{sampling.seed}/{session}")
        turn = self._turn(prompt_ids, sampling, rng)
        self._running += 1
        try:
            await self._emit(turn, on_tokens, stream_interval)
        finally:
            self._running -= 1
        return turn

    async def _emit(
        self, turn: Completion, on_tokens: Callable[[Chunk], None] | None, stream_interval: int
    ) -> None:
        """Wait for the duration of the turn, report its tokens, and label them."""
        await asyncio.sleep(self.config.latency_s)
        for start in range(0, len(turn.token_ids), stream_interval):
            end = min(start + stream_interval, len(turn.token_ids))
            if self.config.tokens_per_s:
                await asyncio.sleep((end - start) / self.config.tokens_per_s)
            if self._closed:
                raise EngineDeadError("the scripted engine was closed")
            contract.extend_spans(turn.version_spans, VersionSpan(self.policy_version, start, end))
            self._stats["sampled_tokens"] += end - start
            if on_tokens is not None and end - start == stream_interval:
                sampled: tuple[list[Any], ...] = turn.token_ids, turn.logprobs, turn.entropies
                on_tokens(Chunk(*(values[start:end] for values in sampled)))

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Set the version; there are no weights."""
        self.policy_version = policy_version

    def stats(self) -> dict[str, float]:
        return {**self._stats, "running": float(self._running), "waiting": 0.0}

    async def close(self) -> None:
        self._closed = True

    def _turn(self, prompt_ids: Sequence[int], sampling: SamplingParams, rng: Random) -> Completion:
        prompt = self.tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        text = self.script(prompt, rng)
        ends = [(text.index(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
        end, stop = min(ends) if ends else (len(text), None)
        token_ids = list(self.tokenizer.encode(text[:end], add_special_tokens=False))
        if stop is None:
            own: int | None = self.tokenizer.eos_token_id
            token_ids.append(min(self._eos_ids) if own is None else own)
        cut = len(token_ids) > sampling.max_tokens
        token_ids = token_ids[: sampling.max_tokens]
        return Completion(
            token_ids=token_ids,
            logprobs=[-rng.random() for _ in token_ids],
            entropies=[rng.random() for _ in token_ids],
            finish_reason="length" if cut else "stop",
            version_spans=[],
            stop=None if cut else stop,
        )


def _load_script(path: str) -> Script:
    try:
        script: Script = loaded(path)
    except ConfigError as error:
        raise named(f"engine.script: {path!r} cannot be loaded", error) from error
    return script
