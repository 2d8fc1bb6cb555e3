"""Log-probs of trained tokens from a Hugging Face causal language model on packed trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learners.batch import MicroBatch


class Policy(nn.Module):
    """A causal language model that answers with figures of the trained tokens only.

    Only positions that predict a trained token go through the head. log p(t) is read from the
    logits of t's predecessor on its path, divided by the temperature.
    """

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        end: Tensor | None,
        source: Tensor,
        targets: Tensor,
        entropies: bool = False,
        matches: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log-probs (with gradient), entropies (nats, detached) and arg-max matches, [tokens].

        Shapes as in MicroBatch. Entropies and matches are empty unless asked for.
        """
        # No mask means plain causal attention, right only because such rows are single paths
        # with padding behind: transformers takes tree positions without a mask for packing.
        hidden = self.model.base_model(
            input_ids=token_ids,
            position_ids=position_ids,
            attention_mask=None if end is None else visible(end),
            use_cache=False,
        ).last_hidden_state
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1)[source])
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs.gather(-1, targets[:, None])[:, 0]
        entropy, match = logprobs.new_empty(0), torch.empty(0, dtype=torch.bool)
        with torch.no_grad():
            if entropies:
                entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            if matches:
                match = all_logprobs.argmax(-1) == targets
        return logprobs, entropy, match

    def pair_cost(self) -> float:
        """Cost of one attention pair, forward and backward, in tokens outside attention.

        Counted multiply-adds: 14 per pair and channel (two products forward, five backward)
        against 6 per weight; embeddings are looked up, not multiplied.
        """
        config = self.model.config
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        weights: int = sum(param.numel() for param in self.model.parameters())
        if embedding is not head:
            weights -= embedding.numel()
        cost: float = 14.0 * width * config.num_hidden_layers / (6.0 * weights)
        return cost


def visible(end: Tensor) -> Tensor:
    """bool [rows, 1, length, length]: query q sees key k iff k <= q < end[k]."""
    place = torch.arange(end.shape[1], device=end.device)
    query, key = place[:, None], place[None, :]
    return ((key <= query) & (query < end[:, None, :]))[:, None]


def tensors(batch: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments of `Policy.forward` on the device; `end` stays None for single paths."""
    arrays = (batch.token_ids, batch.position_ids, batch.end, batch.source, batch.targets)
    return tuple(
        None if array is None else torch.from_numpy(array).to(device)  # type: ignore[misc]
        for array in arrays
    )
