"""The choice of the in-process engine; importing it does not load torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from agentenv.base.errors import ConfigError, EngineError, reported_as
from agentenv.base.offload import in_thread
from agentenv.contract.engine import Engine, EngineCapabilities, EngineStart, LocalModel
from agentenv.engines.embedded.settings import NUM_CACHED_SEQS, EmbeddedSettings


class EmbeddedConfig(EmbeddedSettings, frozen=True, kw_only=True, tag="embedded", tag_field="name"):
    """Settings of the embedded engine."""

    capabilities: ClassVar = EngineCapabilities(
        is_exact=True, has_temperature=True, has_kept=True, can_sleep=True
    )

    @property
    def local_model(self) -> LocalModel:
        return LocalModel(self.dtype, self.max_num_seqs + NUM_CACHED_SEQS, self.device)

    def check_model(self, model: Path) -> None:
        from agentenv.engines.embedded.weights import read_architecture

        remedy = "; choose another model, or engine.name"
        with reported_as(ConfigError, "engine", EngineError, end=remedy):
            read_architecture(model)

    async def start(self, given: EngineStart) -> Engine:
        engine = await in_thread(self._load, given)
        given.stack.push_async_callback(engine.close)
        return engine

    def _load(self, given: EngineStart) -> Engine:
        from agentenv.engines.embedded.engine import EmbeddedEngine

        with reported_as(ConfigError, "engine", EngineError):
            return EmbeddedEngine(self, given.model, given.policy_version, given.tokenizer)
