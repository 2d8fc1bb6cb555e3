"""Small models and adapters on which the contract of engines is checked (contract.py)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.engine import Engine
from agentenv.contract.request import PartEnd, ServerRequest
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.base import sampled
from agentenv.engines.remote.weight_sync import Server
from tests.engines.reference import EOS, VOCAB, write_model

END = 300  # an EOS always follows this token
ORDINARY = range(16, 256)  # ids of prompts: neither END nor EOS


def pool_of(servers: Sequence[Any], folder: Path, **settings: Any) -> EnginePool:
    """A pool of servers that hold the model in `folder`."""
    return EnginePool(servers, folder, 0, vocab_size=VOCAB, eos_ids={EOS}, **settings)


async def streamed(
    server: Any, request: ServerRequest, on_chunk: Callable[[Chunk], None]
) -> Completion:
    """`sampled`, with each chunk for `on_chunk` too."""

    async def generate(request: ServerRequest, keep: Callable[[Chunk], None]) -> PartEnd:
        def both(chunk: Chunk) -> None:
            keep(chunk)
            on_chunk(chunk)

        end: PartEnd = await server.generate(request, both)
        return end

    served: Any = SimpleNamespace(generate=generate)
    return await sampled(served, request)


class Subject(Protocol):
    """The interface of a check; `num_running` is the engine's own count."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> Completion: ...

    async def load_weights(self, source: Path, policy_version: int) -> None: ...

    async def num_running(self) -> int: ...


class ServerSubject:
    """A Server, with request ids of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._ids = itertools.count()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> Completion:
        request = ServerRequest(f"contract-{id(self):x}-{next(self._ids)}", prompt_ids, sampling)
        return await streamed(self.server, request, on_chunk or (lambda chunk: None))

    async def load_weights(self, source: Path, policy_version: int) -> None:
        await self.server.load_weights(source, policy_version)

    async def num_running(self) -> int:
        load = await self.server.load()
        return load.num_running + load.num_waiting


class EngineSubject:
    """An Engine that counts "running" and "waiting" requests in its stats."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, session="s", on_tokens=on_chunk)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        await self.engine.load_weights(source, policy_version)

    async def num_running(self) -> int:
        stats = self.engine.stats()
        return int(stats["running"] + stats["waiting"])


class World:
    """Models of one architecture in directories below `root`, by policy version.

    Their turns end only in the end-of-sequence token after END, so that long turns stay long.
    """

    def __init__(self, root: Path, *, tied: bool, num_models: int = 4) -> None:
        self.paths = [root / f"v{version}" for version in range(num_models)]
        self.models = {
            version: _write(path, version, tied) for version, path in enumerate(self.paths)
        }
        self.tokenizer = AutoTokenizer.from_pretrained(self.paths[0])


def _write(path: Path, seed: int, tied: bool) -> Any:
    """Direction 0 of the hidden state belongs to the end of a turn: layers neither read nor write
    it, it is negative for END alone, and the EOS logit is its negative, many times over. END itself
    is not sampled."""
    model = write_model(path, seed, tied=tied)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[0] = 0
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.norm.weight[0] = 8
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[END, 0] = -8
        model.model.embed_tokens.weight[:, 0] = 4
        model.model.embed_tokens.weight[END, 0] = -4
        model.lm_head.weight[EOS] = 0
        model.lm_head.weight[EOS, 0] = -20
    model.save_pretrained(path)
    return model


def prompt(seed: int, size: int) -> list[int]:
    """Token ids that are ordinary."""
    return random.Random(seed).choices(ORDINARY, k=size)
