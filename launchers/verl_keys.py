"""Keys of verl in a configuration: refused, with the name of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentenv.errors import ConfigError

# The keys of verl and of the released scripts beside ours; docs/from-verl.md is the same table.
#
# VERL_KEYS[theirs] = (ours, note). Several of ours are separated by ", "; none: the note says why.
# A name that ends in ".*" stands for all keys below it, if no longer name does.

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_M, _F = "actor_rollout_ref.model", "actor_rollout_ref.ref"
_TOOL = f"{_R}.tools.tool_instances"
_BUDGET = "learner.max_tokens_per_microbatch"
_KEPT = "always so"
_FSDP = "ZeRO stages in place of FSDP"
_NO_CRITIC = "no critic: advantages are relative to the group"

VERL_KEYS: dict[str, tuple[str, str]] = {
    # data
    "data.train_files": ("data.train", ""),
    "data.val_files": ("eval.sets.NAME.path", "a table for each file"),
    "data.prompt_key": ("data.columns.question", "known names are found by themselves"),
    "data.reward_fn_key": ("data.env_by", "data_source chooses environment and grader"),
    "data.max_prompt_length": ("limits.max_prompt_tokens", ""),
    "data.max_response_length": ("limits.max_response_tokens", "tool results count"),
    "data.train_batch_size": ("queue.groups_per_step", "prompts"),
    "data.val_batch_size": ("eval.concurrency", ""),
    "data.filter_overlong_prompts": ("data.overlong_prompt", "'skip'"),
    "data.truncation": ("data.overlong_prompt", "'error' or 'cut'"),
    "data.apply_chat": ("prompt.apply_chat_template", ""),
    "data.prompt_template_name": ("prompt.template", ""),
    "data.tokenizer": ("", "that of model.path"),
    "data.shuffle": ("", "always, by run.seed"),
    "data.custom_cls.*": ("", "columns and files of other forms: docs/data.md"),
    "data.*": ("", "text only; tokens are never made anew, and no code comes with data"),
    # model
    f"{_M}.path": ("model.path", ""),
    f"{_M}.enable_gradient_checkpointing": ("learner.activation_checkpointing", ""),
    f"{_M}.lora_rank": ("learner.lora.r", ""),
    f"{_M}.lora_alpha": ("learner.lora.alpha", ""),
    f"{_M}.target_modules": ("learner.lora.target_modules", ""),
    f"{_M}.use_remove_padding": ("", "nothing is ever padded"),
    f"{_M}.*": ("", "the model is that of transformers; the log-prob head never holds all logits"),
    # actor
    f"{_A}.strategy": ("learner.backend", "deepspeed or torch"),
    f"{_A}.ppo_mini_batch_size": ("learner.groups_per_minibatch", "prompts"),
    f"{_A}.ppo_micro_batch_size": (_BUDGET, "tokens in place of rows"),
    f"{_A}.ppo_micro_batch_size_per_gpu": (_BUDGET, "tokens in place of rows"),
    f"{_A}.ppo_max_token_len_per_gpu": (_BUDGET, "shared tokens count once"),
    f"{_A}.use_dynamic_bsz": ("", "always: micro-batches are bounded by tokens"),
    f"{_A}.grad_clip": ("learner.grad_clip", ""),
    f"{_A}.clip_ratio": ("algorithm.clip_low, algorithm.clip_high", ""),
    f"{_A}.clip_ratio_low": ("algorithm.clip_low", ""),
    f"{_A}.clip_ratio_high": ("algorithm.clip_high", "0.28 unless set"),
    f"{_A}.clip_ratio_c": ("algorithm.dual_clip", ""),
    f"{_A}.loss_agg_mode": ("algorithm.aggregation", "over the mini-batch of all ranks"),
    f"{_A}.policy_loss": ("algorithm.name", "gspo is an algorithm of its own"),
    f"{_A}.entropy_coeff": ("algorithm.entropy_bonus", ""),
    f"{_A}.use_kl_loss": ("algorithm.kl_loss", "0 builds no reference model"),
    f"{_A}.kl_loss_coef": ("algorithm.kl_loss", ""),
    f"{_A}.kl_loss_type": ("algorithm.kl_kind", "low_var_kl is k3, kl k1, mse k2"),
    f"{_A}.enable_entropy_balanced_clipping": ("algorithm.entropy_balanced_clipping", "aepo"),
    f"{_A}.enable_entropy_balanced_advantage": ("algorithm.entropy_advantage", "aepo; 0 is off"),
    f"{_A}.ppo_epochs": ("learner.num_epochs_per_batch", ""),
    f"{_A}.shuffle": ("", "mini-batches come in the order of the questions"),
    f"{_A}.use_torch_compile": ("", "attention on GPUs is compiled, nothing else"),
    f"{_A}.ulysses_sequence_parallel_size": ("", "none; a path has to fit on one rank"),
    f"{_A}.checkpoint.contents": ("", "a checkpoint always holds all, beside a model directory"),
    f"{_A}.optim.lr": ("learner.learning_rate", ""),
    f"{_A}.optim.lr_warmup_steps": ("learner.warmup_steps", ""),
    f"{_A}.optim.lr_warmup_steps_ratio": ("learner.warmup_ratio", ""),
    f"{_A}.optim.min_lr_ratio": ("learner.min_lr_ratio", ""),
    f"{_A}.optim.num_cycles": ("", "the cosine goes down once"),
    f"{_A}.optim.warmup_style": ("learner.schedule", "constant, linear or cosine"),
    f"{_A}.optim.total_training_steps": ("train.num_steps", ""),
    f"{_A}.optim.weight_decay": ("learner.weight_decay", "not on norms, biases, embeddings"),
    f"{_A}.fsdp_config.param_offload": ("learner.offload", "'params', with zero_stage = 3"),
    f"{_A}.fsdp_config.optimizer_offload": ("learner.offload", "'optimizer'"),
    f"{_A}.fsdp_config.grad_offload": ("learner.offload", "they go with the optimizer's state"),
    f"{_A}.fsdp_config.reshard_after_forward": ("learner.zero_stage", "3 splits weights, 2 not"),
    f"{_A}.fsdp_config.fsdp_size": ("learner.num_ranks", "all ranks split together"),
    f"{_A}.fsdp_config.*": ("", _FSDP),
    # reference
    f"{_F}.log_prob_max_token_len_per_gpu": (_BUDGET, ""),
    f"{_F}.*": ("", "a reference model is built only with algorithm.kl_loss or kl_reward"),
    # rollout
    "actor_rollout_ref.hybrid_engine": ("resources.colocated", "false unless set"),
    f"{_R}.name": ("engine.name", ""),
    f"{_R}.mode": ("env.id", "rollouts are always asynchronous; the environment has the tools"),
    f"{_R}.n": ("algorithm.group_size", ""),
    f"{_R}.initial_rollouts": ("algorithm.initial_rollouts", "half of the group unless set"),
    f"{_R}.beam_size": ("algorithm.beam_size", ""),
    f"{_R}.branch_probability": ("algorithm.base_probability", ""),
    f"{_R}.entropy_weight": ("algorithm.entropy_weight", "of a mean entropy; theirs is a sum"),
    f"{_R}.enable_dynamic_rollouts": ("algorithm.budget_split", "aepo; on unless false"),
    f"{_R}.temperature": ("sampling.train.temperature", "1; the learner's is learner.temperature"),
    f"{_R}.top_k": ("sampling.train.top_k", "-1: training samples from the policy itself"),
    f"{_R}.top_p": ("sampling.train.top_p", "1: training samples from the policy itself"),
    f"{_R}.do_sample": ("sampling.train.temperature", ""),
    f"{_R}.prompt_length": ("limits.max_prompt_tokens", ""),
    f"{_R}.response_length": ("limits.max_response_tokens", ""),
    f"{_R}.dtype": ("engine.servers.dtype", ""),
    f"{_R}.gpu_memory_utilization": ("engine.servers.gpu_memory_share", ""),
    f"{_R}.tensor_model_parallel_size": ("engine.servers.tensor_parallel_size", ""),
    f"{_R}.max_model_len": ("engine.max_model_len", ""),
    f"{_R}.max_num_seqs": ("engine.servers.max_num_seqs", ""),
    f"{_R}.max_num_batched_tokens": ("engine.servers.args", '["--max-num-batched-tokens", "N"]'),
    f"{_R}.enforce_eager": ("engine.servers.args", '["--enforce-eager"]'),
    f"{_R}.enable_chunked_prefill": ("engine.servers.args", ""),
    f"{_R}.engine_kwargs.*": ("engine.servers.args", "as the engine spells them"),
    f"{_R}.load_format": ("engine.weights", "directory or broadcast"),
    f"{_R}.layered_summon": ("engine.weights", "always bucket by bucket"),
    f"{_R}.log_prob_max_token_len_per_gpu": (_BUDGET, ""),
    f"{_R}.log_prob_micro_batch_size": (_BUDGET, ""),
    f"{_R}.log_prob_micro_batch_size_per_gpu": (_BUDGET, ""),
    f"{_R}.val_kwargs.temperature": ("sampling.eval.temperature", ""),
    f"{_R}.val_kwargs.top_k": ("sampling.eval.top_k", ""),
    f"{_R}.val_kwargs.top_p": ("sampling.eval.top_p", ""),
    f"{_R}.val_kwargs.n": ("eval.sets.NAME.num_samples", ""),
    f"{_R}.val_kwargs.do_sample": ("sampling.eval.temperature", "0 is greedy"),
    f"{_R}.multi_turn.enable": ("", f"{_KEPT}; the released scripts never define its variable"),
    f"{_R}.multi_turn.max_turns": ("limits.max_turns", ""),
    f"{_R}.multi_turn.tool_config_path": ("env.tools", ""),
    f"{_R}.multi_turn.format": ("renderer.name", ""),
    f"{_R}.search_url": ("search.backend.url", "search.backend.name = remote"),
    f"{_R}.free_cache_engine": ("resources.colocated", "servers sleep while the learner trains"),
    f"{_R}.*": ("", "nothing here needs it"),
    # tools
    f"{_R}.tools.call_limit": ("limits.max_tool_calls", "all tools together"),
    f"{_R}.tools.max_workers": ("env.tools[n].max_concurrency", ""),
    f"{_R}.tools.timeout": ("env.tools[n].timeout_s", ""),
    f"{_R}.tools.retry_count": ("env.tools[n].num_retries", "of failed machinery only"),
    f"{_R}.tools.fail_on_error": ("env.tools[n].required", ""),
    f"{_R}.tools.verbose_logging": ("log.trajectories", ""),
    f"{_TOOL}.python.class_path": ("env.tools[n].name", "the environment has python"),
    f"{_TOOL}.python.params.conda_path": ("python.interpreter", "a folder; sandboxed"),
    f"{_TOOL}.python.params.conda_env": ("python.interpreter", "a folder; sandboxed"),
    f"{_TOOL}.search.class_path": ("search.backend.name", ""),
    f"{_TOOL}.search.params.api_key": ("", "from the environment only: BRIGHTDATA_API_KEY"),
    f"{_TOOL}.search.params.zone": ("search.backend.zone", ""),
    f"{_TOOL}.search.params.max_results": ("search.max_results", ""),
    f"{_TOOL}.search.params.result_length": ("search.max_chars_per_result", ""),
    f"{_TOOL}.search.params.location": ("search.market", ""),
    f"{_TOOL}.search.params.cache_file": ("search.arpo_cache, search.cache", "theirs, ours"),
    f"{_TOOL}.search.params.async_cache_write": ("", _KEPT),
    # reward, advantage
    "reward_model.reward_manager": ("grader.kind", ""),
    "reward_model.sandbox_fusion.url": ("python.remote_url", ""),
    "reward_model.sandbox_fusion.max_concurrent": ("env.tools[n].max_concurrency", ""),
    "reward_model.launch_reward_fn_async": ("", _KEPT),
    "reward_model.*": ("", "no reward model; a judge is grader.judge"),
    "custom_reward_function.path": ("grader.path", ""),
    "custom_reward_function.name": ("grader.name", ""),
    "critic.*": ("", _NO_CRITIC),
    "algorithm.adv_estimator": ("algorithm.name", "grpo, rloo, reinforce_pp, ..., arpo, aepo"),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.normalize_by_std", ""),
    "algorithm.use_kl_in_reward": ("algorithm.kl_reward", "0 is off"),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_reward", ""),
    "algorithm.kl_ctrl.*": ("algorithm.kl_reward", "constant"),
    "algorithm.kl_penalty": ("algorithm.kl_kind", "of kl_loss; kl_reward takes the log-ratio"),
    "algorithm.gamma": ("", _NO_CRITIC),
    "algorithm.lam": ("", _NO_CRITIC),
    "algorithm.use_pf_ppo": ("", "not here"),
    "algorithm.pf_ppo.*": ("", "not here"),
    # trainer
    "trainer.total_epochs": ("train.num_epochs", ""),
    "trainer.total_training_steps": ("train.num_steps", ""),
    "trainer.project_name": ("monitor.wandb.project", ""),
    "trainer.experiment_name": ("run.name", ""),
    "trainer.logger": ("monitor.wandb, monitor.tensorboard", "metrics.jsonl is always there"),
    "trainer.log_val_generations": ("monitor.num_trajectories", ""),
    "trainer.rollout_data_dir": ("log.trajectories", "in the run's folder trajectories/"),
    "trainer.rollout_save_path": ("log.trajectories", "in the run's folder trajectories/"),
    "trainer.validation_data_dir": ("", "always, in the run's folder eval/"),
    "trainer.default_local_dir": ("run.dir", ""),
    "trainer.nnodes": ("learner.num_ranks", "over machines: learner.launch = external"),
    "trainer.n_gpus_per_node": ("learner.num_ranks, engine.servers.num_servers", "they share"),
    "trainer.device": ("engine.servers.device", "the learner takes GPUs if there are any"),
    "trainer.save_freq": ("checkpoint.every", ""),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep_last", ""),
    "trainer.test_freq": ("eval.sets.NAME.every", ""),
    "trainer.val_before_train": ("eval.sets.NAME.phases", "before, and at the end"),
    "trainer.resume_mode": ("", "the command line: --resume, with latest, best or a path"),
    "trainer.resume_from_path": ("", "the command line: --resume PATH"),
    "trainer.balance_batch": ("", "always: trees are dealt to ranks by cost"),
    "trainer.*": ("", "nothing here needs it"),
    "ray_init.*": ("", "one controller process; no Ray"),
    "hydra.*": ("run.dir", "the run's folder holds log and configuration"),
    # variables of the released scripts that are not passed on under another name above
    "ENABLE_DYNAMIC_ROLLOUTS": ("algorithm.budget_split", "aepo; on unless false"),
    "ENABLE_ENTROPY_BALANCED_CLIPPING": ("algorithm.entropy_balanced_clipping", "aepo"),
    "ENABLE_ENTROPY_BALANCED_ADVANTAGE": ("algorithm.entropy_advantage", "aepo; 0 is off"),
    "ENABLE_POLICY_LOSS_GSPO": ("algorithm.name", "gspo"),
    "ENABLE_MULTI_TURN": ("", f"{_KEPT}; the released scripts never define it"),
}


DOCUMENT = "docs/from-verl.md"


def refuse_verl_keys(raw: dict[str, Any], source: str) -> None:
    """Raises ConfigError that names ours for each key of verl's among the values of `raw`.

    `+key` and `++key`, as Hydra writes overrides, are the same keys.
    """
    found = {key: entry for key, entry in map(_entry, _dotted(raw)) if entry is not None}
    if found:
        lines = [f"  {key}: {told(*entry)}" for key, entry in found.items()]
        raise ConfigError(
            f"{source}: keys of verl, which have other names here ({DOCUMENT}):\n"
            + "\n".join(lines)
        )


def told(ours: str, note: str) -> str:
    """What to use in place of a key."""
    if not ours:
        return f"there is none; {note}"
    return f"use {ours}" + (f" ({note})" if note else "")


def find(key: str) -> tuple[str, str] | None:
    """Ours and the note for a key of verl's; None for a key that is none."""
    if key in VERL_KEYS:
        return VERL_KEYS[key]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        entry = VERL_KEYS.get(".".join(parts[:length]) + ".*")
        if entry is not None:
            return entry
    return None


def _entry(key: str) -> tuple[str, tuple[str, str] | None]:
    key = key.lstrip("+")
    # Tables that both have: only names that are not ours get a general answer.
    if key.partition(".")[0] in ("data", "algorithm") and key not in VERL_KEYS:
        return key, find(key) if key.startswith(_THEIR_TABLES) else None
    return key, find(key)


_THEIR_TABLES = ("data.custom_cls.", "algorithm.kl_ctrl.", "algorithm.pf_ppo.")


def _dotted(raw: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in raw.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from _dotted(value, key)
        else:
            yield key
