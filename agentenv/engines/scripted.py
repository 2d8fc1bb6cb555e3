"""A deterministic engine for tests and dry runs: replies come from a function, not from a model.

It honours the whole contract (streaming, stop strings, limits, versions, abort), so the rest of
the system cannot tell. Under a virtual clock two runs with one seed are equal to the bit.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

from msgspec import Meta, Struct

from agentenv.errors import ConfigError, EngineDeadError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

Script = Callable[[str, Random], str]


class ScriptedConfig(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="scripted", tag_field="name"
):
    """Configuration of the scripted engine."""

    script: Annotated[
        str,
        Meta(description="'module:function' called with (prompt text, Random), returns the turn"),
    ] = "envs.quickstart_script:scripted_turn"
    max_model_len: Annotated[int, Meta(ge=1, description="tokens of prompt and turn")] = 4096
    tokens_per_s: Annotated[
        float, Meta(ge=0, description="sampling speed of one request; 0 is at once")
    ] = 0.0
    latency_s: Annotated[float, Meta(ge=0, description="time before a turn's first token")] = 0.0


class ScriptedEngine:
    """Engine whose turns are written by `script` (or by the function that the config names).

    Log-probabilities and entropies are made up from the request's seed. A turn that does not end
    in a stop string gets the end-of-sequence token.
    """

    def __init__(
        self,
        config: ScriptedConfig,
        tokenizer: Any,
        *,
        script: Script | None = None,
        policy_version: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.script = script or _load_script(config.script)
        self._version = policy_version
        self._closed = False
        self._stats = {"requests": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
    ) -> Completion:
        self._check(prompt_ids, sampling)
        self._stats["requests"] += 1
        self._stats["prompt_tokens"] += len(prompt_ids)
        rng = Random(f"{sampling.seed}/{session}")
        turn = self._turn(prompt_ids, sampling, rng)
        await asyncio.sleep(self.config.latency_s)
        for start in range(0, len(turn.token_ids), stream_interval):
            end = min(start + stream_interval, len(turn.token_ids))
            if self.config.tokens_per_s:
                await asyncio.sleep((end - start) / self.config.tokens_per_s)
            if self._closed:
                raise EngineDeadError("the scripted engine was closed")
            _extend_span(turn.version_spans, self._version, start, end)
            self._stats["sampled_tokens"] += end - start
            if on_tokens is not None and end - start == stream_interval:
                on_tokens(
                    Chunk(
                        turn.token_ids[start:end],
                        turn.logprobs[start:end],
                        turn.entropies[start:end],
                    )
                )
        return turn

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Take the version; there are no weights to read."""
        self._version = policy_version

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    async def close(self) -> None:
        self._closed = True

    def _check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        if self._closed:
            raise EngineDeadError("the scripted engine was closed")
        if not prompt_ids or sampling.max_tokens < 1:
            raise EngineError("the prompt is empty or max_tokens is below 1")
        if len(prompt_ids) + sampling.max_tokens > self.config.max_model_len:
            raise EngineError(
                f"{len(prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
                f"max_model_len {self.config.max_model_len}"
            )

    def _turn(self, prompt_ids: Sequence[int], sampling: SamplingParams, rng: Random) -> Completion:
        prompt = self.tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        text = self.script(prompt, rng)
        ends = [(text.index(stop) + len(stop), stop) for stop in sampling.stop if stop in text]
        end, stop = min(ends) if ends else (len(text), None)
        token_ids = list(self.tokenizer.encode(text[:end], add_special_tokens=False))
        if stop is None:
            token_ids.append(self.tokenizer.eos_token_id)
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


def _extend_span(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    if spans and spans[-1].version == version:
        spans[-1] = VersionSpan(version, spans[-1].start, end)
    else:
        spans.append(VersionSpan(version, start, end))


def _load_script(path: str) -> Script:
    module, _, name = path.partition(":")
    try:
        script: Script = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine.script: {path!r} cannot be loaded: {error}") from error
    return script
