"""Sampling: one token of each row of logits, with its log-prob and entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentenv.base.types import SamplingParams


class TokenSampler:
    """The sampling parameters of a batch of rows as tensors.

    `seen` has a row's tokens so far, prompt and output; it is used only with a penalty. `kept`: by
    row the ids that could be sampled in the last call; empty for rows that do not request them.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        device: torch.device,
        vocab_size: int = 0,
        seen: Callable[[int], Sequence[int]] = lambda row: (),
    ) -> None:
        def column(values: Sequence[float], neutral: float) -> Tensor | None:
            """None: no row differs from the neutral value."""
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device).unsqueeze(1)

        # Greedy rows report the whole distribution at temperature 1.
        random = [p if p.temperature else SamplingParams(max_tokens=1) for p in params]
        self._greedy = column([p.temperature == 0 for p in params], False)
        self._temperature = column([p.temperature for p in random], 1.0)
        self._top_k = column([p.top_k if p.top_k > 0 else 2**31 for p in random], 2**31)
        self._top_p = column([p.top_p for p in random], 1.0)
        self._min_p = column([p.min_p for p in random], 0.0)
        self._keeps = column([p.returns_kept for p in params], False)
        self.kept: list[list[int]] = [[]] * len(params)
        self._penalty = column([p.repetition_penalty for p in params], 1.0)
        self._seen: Tensor | None = None  # bool [S, vocab_size], with a penalty only
        if self._penalty is not None:
            self._seen = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)
            for row, p in enumerate(params):
                if p.repetition_penalty != 1:
                    self._seen[row, torch.tensor(seen(row), dtype=torch.long)] = True

    def sample(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids int64, log-probabilities and entropies (nats), each [S].

        logits: float32 [S, vocab_size]; uniforms: float64 [S] in [0, 1), one for each row. The
        token is the inverse of the cumulative distribution at its row's uniform. A greedy row
        takes the most likely token and reports the distribution at temperature 1. A row's token
        counts as seen in the next call.
        """
        if self._seen is not None and self._penalty is not None:
            penalized = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(self._seen, penalized, logits)  # CTRL, Keskar et al. 2019
        scores = logits if self._temperature is None else logits / self._temperature
        if self._min_p is not None:
            floor = scores.amax(-1, keepdim=True) + self._min_p.log()
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if self._top_k is not None or self._top_p is not None:
            scores = truncate(scores, self._top_k, self._top_p)
        probs = scores.softmax(-1)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        # The target is in (0, total], so the first sum that reaches it has a positive term.
        target = (1.0 - uniforms).unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target).clamp_(max=logits.shape[1] - 1)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, logits.argmax(-1, True), tokens)
        logprobs = probs.gather(1, tokens).log_()
        # H = log Z - E[score], and log Z = score of the token - its log-probability.
        log_total = scores.gather(1, tokens) - logprobs
        if self._keeps is not None:
            kept = (scores > -torch.inf) & self._keeps
            parts = torch.split(kept.nonzero()[:, 1], kept.sum(-1).tolist())
            self.kept = [ids.tolist() for ids in parts]
        if any(one is not None for one in (self._top_k, self._top_p, self._min_p)):
            scores = scores.masked_fill(probs == 0, 0.0)
        if self._seen is not None:
            self._seen.scatter_(1, tokens, True)
        entropies = log_total.squeeze(1) - (probs * scores).sum(-1)
        return tokens.squeeze(1), logprobs.squeeze(1), entropies.clamp_(min=0.0)


def truncate(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Scores with -inf outside the top_k most likely and, of those, the top_p nucleus."""
    ordered, order = scores.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    if top_k is not None:
        ordered = ordered.masked_fill(ranks >= top_k, -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        ordered = ordered.masked_fill((before >= top_p) & (ranks > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
