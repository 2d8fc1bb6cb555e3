"""Files that a rank writes: Hugging Face directories for engines, and checkpoints for itself.

Both appear under their final name only when complete: a directory without model.safetensors, or
one called *.partial, is unfinished.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agentenv.errors import DataError

WEIGHTS = "model.safetensors"
CHECKPOINT = "learner.pt"
SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def write_model(model: Any, source: Path, directory: Path) -> None:
    """Write `model` as a Hugging Face directory; the other files come from `source`.

    Tied weights are stored once. Other files of `source` (config, tokenizer, chat template,
    generation_config) are hard-linked, or copied where links are not possible.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        target = directory / path.name
        if path.is_file() and not path.name.endswith(SKIPPED_SUFFIXES) and not target.exists():
            try:
                os.link(path, target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)
    weights: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen:
            seen.add(key)
            weights[name] = tensor.contiguous()
    partial = directory / f"{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    os.replace(partial, directory / WEIGHTS)


def save_state(state: dict[str, Any], directory: Path) -> None:
    """Write a checkpoint directory; an older one of the same name is replaced as a whole."""
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / CHECKPOINT).open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if directory.exists():
        old = directory.with_name(f"{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)


def load_state(directory: Path) -> dict[str, Any]:
    """Read what `save_state` wrote. Raises DataError if it is not there."""
    path = directory / CHECKPOINT
    if not path.is_file():
        raise DataError(f"{directory}: not a complete learner checkpoint ({CHECKPOINT} missing)")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
