"""Random models of every supported architecture, and an embedded engine that serves them."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentenv.base.types import Completion
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.engines.embedded.scheduler import Scheduler
from tests.support.begun import closing

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family, and more keys
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("qwen3", {"head_dim": 16}),
    "qwen2": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2}},
    ),
    "llama": (
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def make(folder: Path, kind: str = "qwen3-tied", seed: int = 0) -> Any:
    """A random model, also its norms and biases, saved to the folder."""
    family, keys = MODELS[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SIZES, **keys)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    async with closing(EmbeddedEngine(EmbeddedConfig(device="cpu", **settings), folder)) as engine:
        yield engine


class Steps:
    """From now on, embedded engines take only the steps that a test permits: requests are still
    running when the test acts on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        step = Scheduler.step

        def when_allowed(scheduler: Scheduler) -> None:
            if not self._allowed.acquire(timeout=60):
                raise TimeoutError("no test let the engine go on")
            step(scheduler)

        monkeypatch.setattr(Scheduler, "step", when_allowed)

    def permit(self, number: int) -> None:
        """Permit more steps. The first may be a waiting one: current commands run after it."""
        self._allowed.release(number)

    def permit_all(self) -> None:
        self.permit(1_000_000)


def prompt(seed: int, size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(size)]


def check(
    model: Any, ids: list[int], done: Completion, temperature: float = 1.0, cache: Any = None
) -> None:
    """Log-probs and entropies are those of a transformers forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + done.token_ids])).logits[0, len(ids) - 1 : -1]
    logs = (logits / temperature).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), chosen, atol=1e-4, rtol=0)
    entropies = torch.tensor(done.entropies)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(-1), atol=1e-4, rtol=0)
    spans = done.version_spans
    assert [s.start for s in spans] + [len(done.token_ids)] == [0] + [s.end for s in spans]
