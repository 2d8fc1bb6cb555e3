"""Log-probs of trained tokens from a Hugging Face causal language model on packed trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
        logprobs, entropy, likeliest = SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
            logits, targets, entropies
        )
        match = likeliest == targets if matches else likeliest[:0].bool()
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


class SelectedLogprobs(torch.autograd.Function):
    """log softmax(logits)[target], entropy and arg-max per row; gradient for the first only.

    Plain autograd keeps and walks three times as many [tokens, vocabulary] tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropies: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits [tokens, vocabulary], targets [tokens]; entropies are empty unless asked for."""
        probabilities = logits.softmax(-1)
        highest, likeliest = logits.max(-1)
        log_total = highest - probabilities.gather(-1, likeliest[:, None])[:, 0].log()
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_total
        entropy = log_total[:0]
        if entropies:
            entropy = log_total - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(probabilities, targets)
        ctx.mark_non_differentiable(entropy, likeliest)
        return logprobs, entropy, likeliest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        """d log p(target) = onehot(target) - softmax."""
        probabilities, targets = ctx.saved_tensors
        gradient = probabilities * -grad[:, None]
        gradient.scatter_add_(-1, targets[:, None], grad[:, None])
        return gradient, None, None


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
