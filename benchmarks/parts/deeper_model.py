"""A model that costs more and answers the same, so that a benchmark waits for its engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def deepened(model: Path, folder: Path, num_extra: int) -> Path:
    """A copy with more layers that add nothing: the same answers from a model that costs more."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("trainer"))
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_layers + num_extra
    if config.get("layer_types"):
        config["layer_types"] += config["layer_types"][-1:] * num_extra
    (folder / "config.json").write_text(json.dumps(config))
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        if not name.startswith("model.layers.0."):
            continue
        silent = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(num_layers, num_layers + num_extra):
            new = name.replace("layers.0.", f"layers.{layer}.")
            tensors[new] = torch.zeros_like(tensor) if silent else tensor.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
