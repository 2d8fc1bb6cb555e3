"""Keys of verl: each is refused with the name of ours, and the names are right."""

from __future__ import annotations

import re

import pytest

from agentenv.assembly.keys.help import describe, find, refuse_verl_keys, verl_keys
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig, SFTRunConfig
from tests.support.warehouse import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
ROW = re.compile(r"^`([^`]+)` \| ([^|]*)$")

# Every key that the released scripts of ARPO, AEPO and Tool-Star pass on the command line.
A, R, M, F = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
SCRIPTS = f"""
algorithm.adv_estimator algorithm.kl_ctrl.kl_coef
data.train_files data.val_files data.prompt_key data.train_batch_size data.max_prompt_length
data.max_response_length data.apply_chat data.prompt_template_name
{M}.path {M}.enable_gradient_checkpointing {M}.use_remove_padding
{A}.optim.lr {A}.ppo_mini_batch_size {A}.use_dynamic_bsz {A}.ppo_max_token_len_per_gpu
{A}.use_kl_loss {A}.kl_loss_coef {A}.kl_loss_type {A}.fsdp_config.param_offload
{A}.fsdp_config.grad_offload {A}.fsdp_config.optimizer_offload
{A}.enable_entropy_balanced_clipping {A}.enable_entropy_balanced_advantage {A}.policy_loss
{R}.log_prob_max_token_len_per_gpu {R}.tensor_model_parallel_size {R}.name {R}.mode
{R}.gpu_memory_utilization {R}.n {R}.initial_rollouts {R}.beam_size {R}.branch_probability
{R}.entropy_weight {R}.enable_dynamic_rollouts {R}.tools.tool_instances.search.params.cache_file
{R}.tools.tool_instances.search.class_path {R}.tools.tool_instances.search.params.api_key
{R}.multi_turn.enable {R}.search_url
{F}.log_prob_max_token_len_per_gpu {F}.fsdp_config.param_offload
reward_model.reward_manager custom_reward_function.path custom_reward_function.name
trainer.critic_warmup trainer.logger trainer.project_name trainer.experiment_name
trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq trainer.total_epochs
trainer.default_local_dir trainer.default_hdfs_dir trainer.val_before_train
trainer.rollout_data_dir trainer.rollout_save_path hydra.run.dir
ENABLE_DYNAMIC_ROLLOUTS ENABLE_ENTROPY_BALANCED_CLIPPING ENABLE_ENTROPY_BALANCED_ADVANTAGE
ENABLE_POLICY_LOSS_GSPO ENABLE_MULTI_TURN
""".split()


def our_keys() -> set[str]:
    """All names, a table's own and an algorithm's or backend's name included."""
    names = {key.name for key in describe(TrainConfig)}
    tables = {key.rsplit(".", count)[0] for key in names for count in range(1, key.count(".") + 1)}
    tables |= {table.removesuffix("[n]") for table in tables}
    return names | tables | {f"{table}.name" for table in tables}


@pytest.mark.parametrize("key", SCRIPTS)
def test_every_key_of_the_scripts_is_known(key: str) -> None:
    entry = find(key)
    assert entry is not None
    assert any(entry), "ours, or why there is none"


def test_our_keys_exist() -> None:
    known = our_keys()
    for theirs, (ours, note) in verl_keys().items():
        assert ours or note, theirs
        for name in filter(None, ours.split(", ")):
            assert name in known, f"{theirs}: we have no {name}"


def test_no_key_is_both_a_verl_key_and_ours() -> None:
    ours = {key.name for key in describe(TrainConfig)} | {"algorithm.name", "engine.name"}
    for name in ours:
        refuse_verl_keys(nested(name), "test")


def nested(key: str) -> dict[str, object]:
    value: object = 1
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def test_the_document_is_part_of_the_table() -> None:
    """The commonest keys that have a counterpart; a refusal has all, with notes and reasons."""
    text = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    rows = {match[1]: match[2] for match in map(ROW.match, text.splitlines()) if match}
    known = {theirs: ours.split(", ") for theirs, (ours, _) in verl_keys().items() if ours}
    table = {theirs: ", ".join(f"`{name}`" for name in ours) for theirs, ours in known.items()}
    assert len(rows) > 50
    assert rows.items() <= table.items()


def test_keys_that_the_document_maps_from_llama_factory_exist() -> None:
    text = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z]+\.[a-z_.]+)`", text.partition("## LLaMA-Factory")[2])
    known = {key.name for config in (SFTRunConfig, DPORunConfig) for key in describe(config)}
    assert len(named) > 15
    assert set(named) <= known
