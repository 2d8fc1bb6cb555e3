"""Low-rank adapters (LoRA, Hu 2022) through peft, on the Hugging Face model itself.

    W' = W + (alpha / r) B A        A: [r, in], B: [out, r]; W is frozen

The model keeps its class and its names, with adapters inside. Publishing computes W' in a new
tensor, so that it never changes W or the adapter.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Struct

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError, MissingError
from agentenv.base.installation import install_hint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADAPTER = "default"
BASE = ".base_layer."
ADAPTER_FOLDER = "adapter"
# Names of expert layers in published models; peft treats any layer with such a name as an expert's.
OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


class LoRAConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters on linear layers; the original weights are frozen."""

    r: Annotated[int, about("rank of the adapters", ESSENTIAL, ge=1)] = 16
    alpha: Annotated[int, about("adapters are scaled by alpha / r", ge=1)] = 32
    dropout: Annotated[
        float, about("dropout on the adapters' inputs in training passes", ge=0, lt=1)
    ] = 0.0
    target_modules: Annotated[
        list[str],
        about(
            "names of the layers, such as q_proj; empty: all linear layers except the "
            "head; in a model with experts those of attention"
        ),
    ] = []


def add_adapters(model: Any, config: LoRAConfig) -> list[Any]:
    """Add adapters to the model and freeze everything else; returns their dropout modules.

    Raises ConfigError if peft is missing, no layer has one of the names, or one has a layer that
    cannot be merged with its adapter.
    """
    peft_config = _peft_config(config, list(config.target_modules) or _default_targets(model))
    if towers := _towers(model):
        peft_config.exclude_modules = rf"(.*\.)?({'|'.join(towers)})(\..*)?"
    from peft import inject_adapter_in_model

    names = names_of(model)
    try:
        with warnings.catch_warnings(action="ignore"):  # about layers that are rejected below
            inject_adapter_in_model(peft_config, model, ADAPTER)
    except (ValueError, NotImplementedError) as error:  # peft names the missing modules
        raise ConfigError(f"learner.lora.target_modules: {error}") from error
    for name, module in model.named_modules():
        problem = _unmergeable(model, name, module, names) if hasattr(module, "lora_A") else ""
        if problem:
            raise ConfigError(
                f"learner.lora.target_modules: {problem}, so that the merged model could not be "
                "written; expected linear layers other than the head, such as q_proj"
            )
    return [
        module.lora_dropout[ADAPTER]
        for module in model.modules()
        if hasattr(module, "lora_dropout") and ADAPTER in module.lora_dropout
    ]


def has_experts(model: Any) -> bool:
    """Whether the model has experts, which transformers keeps as one tensor with three axes."""
    return any(param.ndim == 3 and "experts" in name for name, param in model.named_parameters())


def _towers(model: Any) -> list[str]:
    """The names of the parts next to the text model, such as vision, which are not trained."""
    text, whole = model.get_decoder(), model.base_model
    if text is whole:
        return []
    return [name for name, part in whole.named_children() if text not in part.modules()]


def _default_targets(model: Any) -> list[str]:
    """Names of layers for peft, without names that it would treat as the experts; empty: all linear
    ones except the head."""
    from torch import nn

    if not has_experts(model):
        return []
    head = model.get_output_embeddings()
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(linear - OF_EXPERTS)


def names_of(model: Any) -> dict[int, list[str]]:
    """The names of each parameter, by its id; several of tied embeddings."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def _unmergeable(model: Any, name: str, module: Any, names: dict[int, list[str]]) -> str:
    """The reason why `merged` does not give the weight of this adapted layer; empty if it does."""
    from peft.tuners.lora.layer import Linear, ParamWrapper
    from torch import nn

    base, family = module.get_base_layer(), type(model).__name__
    if isinstance(module, ParamWrapper):
        return f"{module.parameter_name} would be an expert or the router of {family}"
    if type(module) is not Linear or not isinstance(base, nn.Linear) or module.fan_in_fan_out:
        return f"{name} of {family} is of class {type(base).__name__}, not a linear layer"
    if len(tied := names[id(base.weight)]) > 1:
        return f"{name} of {family} shares its weight with {' and '.join(tied)}"
    if module is model.get_output_embeddings():
        return f"{name} is the head of {family}"
    weight = f"{name}.weight"
    disk = disk_shapes(model, weight, tuple(base.weight.shape), base.weight.dtype)
    if [*disk.values()] != [tuple(base.weight.shape)]:
        return f"{name} of {family} is stored as {' and '.join(disk)}"
    return ""


def empty_model(config: Any) -> Any:
    """The model of a configuration of transformers, without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name of a parameter in the model without adapters."""
    return name.replace(BASE, ".")


def on_disk(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors on disk, by name, that transformers writes for a parameter (or buffer) of the
    model, and from which it loads the parameter."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def disk_shapes(
    model: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `on_disk`."""
    import torch

    meta = torch.empty(shape, dtype=dtype, device="meta")
    return {disk: tuple(part.shape) for disk, part in on_disk(model, name, meta).items()}


def factors(model: Any, name: str) -> tuple[Tensor, Tensor, float] | None:
    """A, B and alpha / r of the weight `name` in the model with adapters; None without adapters."""
    if not name.endswith(f"{BASE}weight"):
        return None
    layer = model.get_submodule(name.removesuffix(f"{BASE}weight"))
    scale = float(layer.scaling[ADAPTER])
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, scale


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in float32, in the dtype of W; a new tensor."""
    delta = lora_b.detach().float() @ lora_a.detach().float()
    return (weight.detach().float() + scale * delta).to(weight.dtype)


def write_adapter(
    directory: Path, config: LoRAConfig, weights: dict[str, Tensor], base: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft's from_pretrained reads.

    `weights` have the names of the model with adapters; `base` is the path of the frozen model.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in weights}
    peft_config = _peft_config(config, list(config.target_modules) or sorted(layers))
    peft_config.base_model_name_or_path = base
    peft_config.inference_mode = True
    peft_config.save_pretrained(str(directory))


def check_installed() -> None:
    """Raises ConfigError if peft is missing; loads nothing."""
    if importlib.util.find_spec("peft") is None:
        raise MissingError(f"learner.lora requires peft: install it with {install_hint('lora')}")


def _peft_config(config: LoRAConfig, targets: list[str]) -> Any:
    check_installed()
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets or "all-linear",
        bias="none",
    )
