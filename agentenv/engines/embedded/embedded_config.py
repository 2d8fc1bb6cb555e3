"""Settings of the in-process engine; importing them does not load torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.offload import in_thread
from agentenv.contract.engine import (
    Engine,
    EngineCapabilities,
    EngineConfig,
    EngineStart,
    LocalModel,
)


class EmbeddedConfig(
    EngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="embedded",
    tag_field="name",
):
    """Settings of the embedded engine."""

    max_num_seqs: Annotated[
        int, msgspec.Meta(description="Concurrent requests; further ones queue in order.", ge=1)
    ] = 128
    num_cached_seqs: Annotated[
        int, msgspec.Meta(description="Finished requests kept as prefix cache.", ge=0)
    ] = 128
    num_threads: Annotated[
        int, msgspec.Meta(description="CPU threads of torch, process-wide.", ge=1)
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        msgspec.Meta(description="Device of the model; auto: a GPU if available."),
    ] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16"], msgspec.Meta(description="Of weights, keys and values.")
    ] = "float32"

    capabilities: ClassVar = EngineCapabilities(is_exact=True, can_sleep=True)

    @property
    def local_model(self) -> LocalModel:
        return LocalModel(self.dtype, self.max_num_seqs + self.num_cached_seqs, self.device)

    async def start(self, given: EngineStart) -> Engine:
        engine = await in_thread(self._load, given)
        given.stack.push_async_callback(engine.close)
        return engine

    def _load(self, given: EngineStart) -> Engine:
        from agentenv.engines.embedded.engine import EmbeddedEngine

        try:
            return EmbeddedEngine(self, given.model, given.policy_version, given.tokenizer)
        except EngineError as error:
            raise ConfigError(f"engine: {error}") from error
