"""Log-probs of trained tokens from a Hugging Face causal language model on packed trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentenv.errors import ConfigError
from learners.attention import NO_MASK, TreeLayout, use_tree_attention
from learners.batch import MicroBatch
from learners.logprob_head import LogprobHead


class Policy(nn.Module):
    """A causal language model that answers with figures of the trained tokens only.

    Only positions that predict a trained token go through the head. log p(t) is read from the
    logits of t's predecessor on its path, divided by the temperature.

    The model's attention and head are replaced by ones that compute the same and can more; its
    parameters stay the objects they were. `checkpointing` keeps only the inputs of each layer for
    the backward pass and computes the rest again. Raises ConfigError for unsuitable models.
    """

    def __init__(
        self, model: Any, temperature: float = 1.0, *, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        causal = _without_adapters(model)
        use_tree_attention(causal)
        head = causal.get_output_embeddings()
        if not isinstance(head, LogprobHead):
            if type(head) is not nn.Linear:
                raise ConfigError(
                    f"the output head is a {type(head).__name__}, not a linear layer; adapters "
                    "belong on the other layers"
                )
            causal.set_output_embeddings(LogprobHead.of(head))
        if checkpointing:
            _checkpoint_layers(causal)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: TreeLayout,
        source: Tensor,
        targets: Tensor,
        entropies: bool = False,
        matches: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log-probs, entropies (nats; both with gradient) and arg-max matches, [tokens].

        Shapes as in MicroBatch. Entropies and matches are empty unless asked for.
        """
        causal = _without_adapters(self.model)
        hidden = causal.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            attention_mask=NO_MASK,
            tree_layout=layout,
            use_cache=False,
        ).last_hidden_state
        logprobs, entropy, likeliest = causal.get_output_embeddings()(
            hidden[0].index_select(0, source), targets, self.temperature
        )
        match = likeliest == targets if matches else likeliest[:0].bool()
        return logprobs, entropy if entropies else entropy[:0], match


def _without_adapters(model: Any) -> Any:
    """The causal language model itself, with adapters inside its layers if there are any."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _checkpoint_layers(model: Any) -> None:
    # Transformers 5.2x renamed it and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    # Layers checkpoint in training mode only; what is inside them stays in the mode it has.
    for layer in model.base_model.layers:
        layer.training = True


def tensors(batch: MicroBatch, device: torch.device) -> tuple[Any, ...]:
    """The arguments of `Policy.forward` on the device."""
    arrays = (batch.token_ids, batch.position_ids, batch.source, batch.targets)
    token_ids, position_ids, source, targets = (torch.from_numpy(a).to(device) for a in arrays)
    return token_ids, position_ids, TreeLayout(batch.end, device), source, targets
