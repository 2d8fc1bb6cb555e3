"""Small models and their results in transformers: the reference for engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentenv.base.types import Completion
from tests.support.chat_models import QWEN25, make_tokenizer

VOCAB = 320
EOS = 7
MAX_LENGTH = 512
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": None, "eos_token_id": EOS,
}  # fmt: skip


def write_model(path: Path, seed: int, *, tied: bool = False) -> Any:
    """A Qwen2 model with 2 heads of 64, float32, with a tokenizer of bytes; also returned."""
    torch.manual_seed(seed)
    # weights of a wider range amplify rounding beyond 1e-4
    config = Qwen2Config(**SIZES, initializer_range=0.15, tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(path)
    tokenizer = make_tokenizer(QWEN25)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest continuation; it may run past an end of sequence."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def distribution(
    model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the whole vocabulary before each of the tokens: [tokens, vocabulary]."""
    logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    rows = logits[len(prompt_ids) - 1 : len(prompt_ids) - 1 + len(token_ids)]
    return torch.log_softmax(rows.double() / temperature, dim=-1)


def check_sampled(
    models: Mapping[int, Any],
    prompt_ids: Sequence[int],
    completion: Completion,
    *,
    temperature: float = 1.0,
    greedy: bool = False,
) -> None:
    """Each token's log-prob is that of the model whose version its span names, with keys and
    values of that model throughout; greedy: and it is the likeliest one."""
    spans = completion.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    assert spans[-1].end == len(completion.token_ids)
    assert len(completion.logprobs) == len(completion.entropies) == len(completion.token_ids)
    for span in spans:
        found = distribution(models[span.version], prompt_ids, completion.token_ids, temperature)
        for place in range(span.start, span.end):
            row, token = found[place], completion.token_ids[place]
            assert completion.logprobs[place] == pytest.approx(float(row[token]), abs=1e-4)
            entropy = float(-(row.exp() * row).sum())
            assert completion.entropies[place] <= entropy + 1e-4
            if greedy:
                assert float(row.max() - row[token]) < 1e-4


@torch.inference_mode()
def processed(
    model: Any,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = -1,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Log-probs after penalty and truncation as SamplingParams defines them: [tokens, vocab]."""
    ids = [*prompt_ids, *token_ids]
    logits = model(torch.tensor([ids])).logits[0].double()
    rows = logits[len(prompt_ids) - 1 : -1].clone()
    for place, row in enumerate(rows):
        seen = torch.tensor(sorted(set(ids[: len(prompt_ids) + place])))
        old = row[seen]
        row[seen] = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
        row /= temperature or 1.0  # greedy: those at temperature 1
        probs = row.softmax(-1)
        row[probs < min_p * probs.max()] = -torch.inf
        if top_k > 0:
            row[row < row.topk(top_k).values[-1]] = -torch.inf
        ordered, order = row.softmax(-1).sort(descending=True)
        row[order[ordered.cumsum(-1) - ordered >= top_p]] = -torch.inf
    return torch.log_softmax(rows, dim=-1)
