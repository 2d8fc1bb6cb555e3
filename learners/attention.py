"""Attention of packed trees behind one interface, inside Hugging Face models.

`use_tree_attention(model)` once; then pass `tree_layout=` and `attention_mask=NO_MASK` to the
model. The layout chooses the form: node blocks on the CPU (`learners.attention_blocked`),
FlexAttention on a GPU (`learners.attention_flex`), a dense mask elsewhere. Without a layout the
model computes what it did before.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.errors import ConfigError
from learners.attention_blocked import BlockPlan, blocked_attention, is_available, visible
from learners.attention_flex import block_mask, flex_tree_attention

NAME = "agentenv_tree"
Form = Literal["blocked", "flex", "dense"]

# Transformers hands a four-dimensional mask on as it is. Without one it would take the positions
# of a tree for those of packed sequences and build a wrong [tokens, tokens] mask from them.
NO_MASK = torch.empty(1, 1, 0, 0, dtype=torch.bool)


class TreeLayout:
    """Which keys each token of a micro-batch sees: k <= q < end[k].

    end: int64 [tokens]. What a form needs is built once and shared by all layers.
    """

    def __init__(
        self, end: NDArray[np.int64], device: torch.device, form: Form | None = None
    ) -> None:
        self.end = end
        self.device = device
        self.form = form or default_form(device)

    @cached_property
    def blocks(self) -> BlockPlan:
        return BlockPlan(self.end)

    @cached_property
    def block_mask(self) -> BlockMask:
        return block_mask(torch.from_numpy(self.end).to(self.device))

    @cached_property
    def mask(self) -> Tensor:
        return visible(torch.from_numpy(self.end).to(self.device))


def default_form(device: torch.device) -> Form:
    """The fastest form that trains on the device."""
    if device.type == "cuda":
        return "flex"
    return "blocked" if device.type == "cpu" and is_available() else "dense"


def use_tree_attention(model: Any) -> None:
    """Let the model's attention read tree layouts.

    Raises ConfigError for models whose attention cannot be replaced or looks through a window,
    which no layout describes, and for attention dropout.
    """
    config, name = model.config, type(model).__name__
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(f"{name} has sliding-window attention; trees need full attention")
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError(
            f"{name}: attention_dropout = {config.attention_dropout}, expected 0 in config.json"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{name}: its attention cannot be replaced; expected a model like Qwen2, Qwen3 or Llama"
        )
    AttentionInterface.register(NAME, _attention)
    # A name without a function for masks would drop the mask of calls without a layout.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_layout: TreeLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query, key, value: [rows, heads, tokens, width]."""
    if tree_layout is None:
        if attention_mask is NO_MASK:
            raise ValueError("NO_MASK goes with tree_layout only")
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output
    if attention_mask is not NO_MASK:
        raise ValueError("a tree_layout needs attention_mask = NO_MASK")
    if query.shape[0] != 1 or query.shape[2] != len(tree_layout.end):
        raise ValueError(f"a layout of {len(tree_layout.end)} tokens for {tuple(query.shape)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree_layout.form == "blocked":
        return blocked_attention(query, key, value, tree_layout.blocks, scale), None
    if tree_layout.form == "flex":
        return flex_tree_attention(query, key, value, tree_layout.block_mask, scale), None
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=tree_layout.mask, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None
