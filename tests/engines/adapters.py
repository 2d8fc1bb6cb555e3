"""LoRA adapters of a small model, as a learner writes them, and the models that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentenv.learners.lora import LoRAConfig, add_adapters, is_adapter, write_adapter

# Neither of the layers that write to the hidden state: there the end of a turn is kept (world.py).
LORA = LoRAConfig(r=4, alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj"])


def write_adapters(base: Path, root: Path, count: int) -> tuple[list[Path], dict[int, Any]]:
    """Directories of `count` adapters, and by version, from 1, the model with each."""
    paths, models = [], {}
    for version in range(1, count + 1):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        add_adapters(model, LORA)
        torch.manual_seed(version)
        weights = {name: p for name, p in model.named_parameters() if is_adapter(name)}
        for param in weights.values():
            param.data.normal_(0, 0.2)
        path = root / f"adapter{version}"
        write_adapter(path, LORA, {n: p.detach().clone() for n, p in weights.items()}, str(base))
        paths.append(path)
        models[version] = model
    return paths, models
