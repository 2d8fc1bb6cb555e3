"""Layers of liger-kernel in place of transformers' own."""

from __future__ import annotations

from typing import Any

import torch

from agentenv.base.errors import ConfigError


def use_liger(model: Any) -> None:
    """Use liger-kernel for norms, rotary positions and feed-forward parts. Raises ConfigError if it
    is not available or does not support the model."""
    kind, instead = model.config.model_type, "set learner.fused = none"
    if not torch.cuda.is_available():
        raise ConfigError(f"learner.fused = liger: its kernels only run on GPUs; {instead}")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
        from transformers.integrations.liger import apply_liger_kernel
    except ImportError as error:
        raise ConfigError(
            f"learner.fused = liger: liger-kernel cannot be imported ({error}): install it with "
            f"pip install liger-kernel, or {instead}"
        ) from error
    if kind not in known:
        raise ConfigError(
            f"learner.fused = liger: it has no kernels for the family {kind}; {instead}"
        )
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
