"""Each family of docs/learner.md in its published layout, with towers and heads that the policy
does not have: from the check of the model to its export, the names and the configuration stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from agentenv.base.errors import ConfigError
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.offline_export import export
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.trees.model_check import check_model, small
from tests.learners.ranks import ALGORITHM, encoded, two_ranks, uneven_trees, weights_in
from tests.learners.test_model_check import RIGHT, name_of

CONFIG = two_ranks(num_ranks=1, zero_stage=0, learning_rate=1e-2, activation_checkpointing=True)
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "out_hidden_size": 64, "num_position_embeddings": 64}  # fmt: skip
NESTED = [
    ("gemma3", {"vision_config": VISION}),
    ("mistral3", {"text_config": {"model_type": "ministral3"},
                  "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}}),
    ("qwen3_5", {"vision_config": QWEN}),
    ("qwen3_5_moe", {"vision_config": QWEN}),
    ("qwen3_vl", {"vision_config": {**QWEN, "deepstack_visual_indexes": [0]}}),
]  # fmt: skip


def publish(folder: Path, family: str, changes: dict[str, Any]) -> Path:
    """A tiny model as its authors publish it, with a head for further tokens (MTP)."""
    config = small(CONFIG_MAPPING[family](**changes))
    nested = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    weights = weights_in(folder) | {"mtp.fc.weight": torch.randn(4, 4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())
    for table in (found, found.get("text_config", {})):
        table.pop("dtype", None)
    return found


def assert_same_layout(folder: Path, source: Path, changed: bool = True) -> None:
    """The names, shapes and configuration of the source, and no tensor that is newly made."""
    now, before = weights_in(folder), weights_in(source)
    assert {n: w.shape for n, w in now.items()} == {n: w.shape for n, w in before.items()}
    assert config_of(folder) == config_of(source)
    apart = [n for n in before if any(part in n for part in ("visi", "visual", "modal", "mtp"))]
    assert all(torch.equal(now[name], before[name]) for name in apart)
    kept = [name for name in before.keys() - apart if torch.equal(now[name], before[name])]
    assert len(kept) < len(before) / 2 or not changed
    nested = "text_config" in config_of(source)
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] | report["mismatched_keys"]
    assert {*report["unexpected_keys"]} <= {"mtp.fc.weight"}


def lead(source: Path, folder: Path, **keys: Any) -> tuple[Path, Path]:
    """A checkpoint of the model after two updates, and its export in float32."""
    config = replace(CONFIG, **keys)
    rank = Rank(wire.Init.of(config, ALGORITHM, str(source), seed=0))
    assert "mtp.fc.weight" in rank.untrained
    trees = encoded(uneven_trees(4))
    for half in (trees[:2], trees[2:]):
        rank.run(wire.Update([half], 1.0))
    checkpoint = folder / "step-000002"
    rank.run(wire.WriteModel(str(checkpoint), publish=False))
    rank.run(wire.Save(str(checkpoint / "trainer")))
    base = checkpoint if config.lora is None else source
    resumed = Rank(wire.Init.of(config, ALGORITHM, str(base), seed=1))
    resumed.run(wire.Load(str(checkpoint / "trainer")))
    again = folder / "again"
    resumed.run(wire.WriteModel(str(again), publish=False))
    expected, found = weights_in(checkpoint), weights_in(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected | found)
    update = folder / "update"
    resumed.run(wire.WriteModel(str(update), publish=True))
    assert weights_in(update).keys() == expected.keys() - rank.untrained, "not into each update"
    export(checkpoint, folder / "out", dtype="float32")
    return checkpoint, folder / "out"


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "changes"), [*NESTED, *RIGHT], ids=name_of)
def test_a_family_keeps_its_published_layout(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = publish(tmp_path / "source", family, changes)
    check_model(source)
    checkpoint, out = lead(source, tmp_path)
    assert_same_layout(checkpoint, source)
    assert_same_layout(out, source)
    written, found = weights_in(checkpoint), weights_in(out)
    assert all(torch.equal(written[name], found[name]) for name in written)
