"""LoRA adapters as peft writes them, checked before a server sees them."""

from __future__ import annotations

from pathlib import Path

from agentenv.engines.checkpoint_layout import Layout, read_header
from agentenv.errors import EngineError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, not a whole model."""
    return (directory / CONFIG).is_file()


def check_adapter(directory: Path, served: Layout | None) -> None:
    """Raises EngineError unless each of its matrices belongs to a weight of the served model;
    engines pass over what they do not know. A: [r, in], B: [out, r], the weight [out, in]."""
    shapes = read_header(directory / WEIGHTS)
    layers = {name.removesuffix(A).removesuffix(B) for name in shapes}
    if not layers:
        raise EngineError(f"{directory / WEIGHTS} is empty")
    for layer in sorted(layers):
        a, b = shapes.get(layer + A), shapes.get(layer + B)
        name = f"{layer.removeprefix(PREFIX)}.weight"
        if a is None or b is None or a[0] != b[1]:
            raise EngineError(f"{directory / WEIGHTS}: {layer} has no pair of matrices")
        if served is not None and served.shapes.get(name) != (b[0], a[1]):
            raise EngineError(
                f"{directory / WEIGHTS} adapts {name} of shape {(b[0], a[1])}, the served model "
                f"has {served.shapes.get(name, 'no such weight')}"
            )
