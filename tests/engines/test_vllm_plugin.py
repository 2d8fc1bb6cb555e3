"""The module that runs inside vLLM: entropies as ranks, and the ends of requests at stop strings.

With a real server: test_vllm.py.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentenv.assembly.serving.server_command import VLLM_PLUGIN


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agentenv_vllm", VLLM_PLUGIN / "agentenv_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entropies(plugin: ModuleType, ranks: torch.Tensor) -> Any:
    assert (ranks >= plugin.ENTROPY).all()
    return (ranks.numpy() - plugin.ENTROPY).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_the_rank_of_a_token_encodes_the_exact_entropy(
    plugin: ModuleType, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits and of log-probs, some of them of tokens that cannot be sampled."""
    monkeypatch.setattr(plugin, "CHUNK", chunk)
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 4
    logits[2, 3:] = -torch.inf
    known = torch.distributions.Categorical(logits=logits.clamp(min=-1e4)).entropy().numpy()
    normal = logits.log_softmax(-1)
    for rows, is_normalized in ((logits, False), (normal, True)):
        ranks = plugin.ranks_of(rows, is_normalized=is_normalized)
        assert entropies(plugin, ranks) == pytest.approx(known, abs=1e-5)


def test_the_entropy_of_a_single_allowed_token_is_zero(plugin: ModuleType) -> None:
    rows = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert plugin.ranks_of(rows, is_normalized=True).tolist() == [plugin.ENTROPY]


def test_a_request_ends_at_the_token_that_completes_a_stop_string(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own check decides where there is none."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</", "ch>"]
    merges = [("<", "/"), ("c", "h>"), ("h", ">")]
    bpe = models.BPE({piece: i for i, piece in enumerate([*pieces, "h>"])}, merges[::-1])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("<search>Who?</search> and more é").ids
    size = tokenizer.get_vocab_size()
    vocabulary = plugin._Vocabulary(SimpleNamespace(get_vocab_size=lambda: size))
    vocabulary._tokenizer = tokenizer
    vocabulary._texts = [tokenizer.decode([i, i]) for i in range(size)]
    monkeypatch.setattr(plugin, "_vocabulary", vocabulary)
    kind = type("Status", (), {"FINISHED_STOPPED": "stopped"})
    check = plugin._stopping(lambda request, length: length == 1)

    def ended(extra: dict[str, Any] | None, num: int) -> tuple[bool, Any]:
        request = SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=extra),
            output_token_ids=ids[:num],
            status=kind(),
            stop_reason=None,
        )
        return check(request, 9), request.stop_reason

    stops = {"stop_strings": ["</answer>", "</search>"]}
    first = next(n for n in range(1, len(ids)) if "</search>" in tokenizer.decode(ids[:n]))
    assert [ended(stops, n)[0] for n in range(1, first)] == [False] * (first - 1)
    assert ended(stops, first) == (True, "</search>")
    assert ended(None, first) == (False, None)
    assert ended({"stop_strings": ["é"]}, len(ids) - 1) == (False, None)  # half of a character
    assert ended({"stop_strings": ["é"]}, len(ids)) == (True, "é")


def test_the_first_server_info_runs_no_programs(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's router imports the function after the plugins are loaded."""
    collect = ModuleType("vllm.collect_env")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.collect_env", collect)
    plugin.register()
    assert collect.get_env_info()._asdict() == {}
