"""Layers of liger-kernel in place of transformers' own."""

from __future__ import annotations

from typing import Any

import torch

from agentenv.base.errors import ConfigError, MissingError

INSTEAD = "set learner.fused = none"


def check_device() -> None:
    """Raises ConfigError on a machine without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(f"learner.fused = liger: its kernels only run on GPUs; {INSTEAD}")


def check_liger(kind: str) -> None:
    """Raises ConfigError if liger-kernel is missing, or does not support this type of model."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as error:
        raise MissingError(
            f"learner.fused = liger: liger-kernel cannot be imported ({error}): install it with "
            f"pip install liger-kernel, or {INSTEAD}"
        ) from error
    if kind not in known:
        raise ConfigError(
            f"learner.fused = liger: it has no kernels for the family {kind}; {INSTEAD}"
        )


def use_liger(model: Any) -> None:
    """Use liger-kernel for norms, rotary positions and feed-forward parts. Raises ConfigError if it
    is not available or does not support the model."""
    check_device()
    check_liger(model.config.model_type)
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
