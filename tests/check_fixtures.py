"""Check a directory of fixture files against losses and graders, and report the passing cases.

    python tests/check_fixtures.py DIR

A file NAME.json holds {"cases": [...]}, each case with a unique "name" or a number, and what they
share beside. Matrices are [trajectory, token]; "nan", "inf" and "-inf" are strings. Exit code 1 if
a case fails.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentenv.learners.algorithms import losses
from agentenv.reference import grading
from agentenv.reference.algorithms import ReleasedGRPO, entropy_multiplier, group_advantages
from tests.support import released_losses, rollout_checks

RTOL, ATOL = 1e-9, 1e-8

Case = dict[str, Any]
Values = dict[str, Any]


def tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=object).astype(np.float64))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / (mask.sum() + 1e-8)


def policy_loss(case: Case, coefficient: float = 0.2) -> Values:
    """Loss, metrics and gradient; both the dual-clip and the entropy-balanced file."""
    logprobs = tensor(case["log_prob"]).requires_grad_()
    old, mask = tensor(case["old_log_prob"]), tensor(case["response_mask"])
    advantages = tensor(case["advantages"])
    if case.get("balanced_advantage") and case.get("entropy") is not None and mask.any():
        advantages = scaled_advantages(case, coefficient)["scaled_advantages"]
    low, high, dual = (float(case[key]) for key in ("clip_low", "clip_high", "clip_c"))
    ratio = ReleasedGRPO().ratio(logprobs, old)
    balanced = case.get("balanced_clipping", False)
    token_loss = (losses.entropy_balanced_loss if balanced else losses.ppo_loss)(
        ratio, advantages, low, high, dual
    )
    loss = released_losses.aggregate(token_loss, mask, case["loss_agg_mode"])
    loss.backward()
    clipped, cut = released_losses.clip_shares(ratio.detach(), advantages, low, high, dual)
    return {
        "pg_loss": loss, "pg_clipfrac": masked_mean(clipped, mask),
        "pg_clipfrac_lower": masked_mean(cut, mask), "ppo_kl": masked_mean(old - logprobs, mask),
        "grad_log_prob": logprobs.grad, "token_loss": token_loss, "scaled_advantages": advantages,
    }  # fmt: skip


def gspo(case: Case) -> Values:
    """Loss, metrics and gradient of the sequence-level ratio."""
    logprobs = tensor(case["log_prob"]).requires_grad_()
    old, mask, advantages = (
        tensor(case[key]) for key in ("old_log_prob", "response_mask", "advantages")
    )
    low, high = float(case["clip_low"]), float(case["clip_high"])
    token_loss, ratio = released_losses.gspo_loss(logprobs, old, advantages, mask, low, high)
    loss = released_losses.aggregate(token_loss, mask, "seq-mean-token-mean")
    loss.backward()
    clipped, _ = released_losses.clip_shares(ratio.detach(), advantages, low, high, math.inf)
    return {
        "pg_loss": loss,
        "pg_clipfrac": masked_mean(clipped, mask),
        "pg_clipfrac_lower": torch.zeros((), dtype=torch.float64),
        "ppo_kl": masked_mean(old - logprobs, mask),
        "grad_log_prob": logprobs.grad,
        "seq_ratio": ratio,
    }


def scaled_advantages(case: Case, coefficient: float = 0.2) -> Values:
    entropies, mask = tensor(case["entropy"]), tensor(case["response_mask"])
    mean, std = losses.entropy_statistics(entropies, mask)
    multiplier = entropy_multiplier(entropies, mean, std, coefficient)
    return {
        "mean": mean,
        "std_unbiased": std,
        "scaled_advantages": tensor(case["advantages"]) * multiplier,
    }


def grpo_advantage(case: Case) -> Values:
    rewards = tensor(case["token_level_rewards"]).sum(-1).numpy()
    groups = np.array(case["group_ids"], dtype=object)
    advantages = np.zeros_like(rewards)
    for group in dict.fromkeys(case["group_ids"]):
        advantages[groups == group] = group_advantages(
            rewards[groups == group], norm_by_std=case["norm_by_std"], epsilon=case["epsilon"]
        )
    return {"advantages": torch.from_numpy(advantages)[:, None] * tensor(case["response_mask"])}


def agg_loss(case: Case) -> Values:
    matrix = tensor(case["loss_mat"]).requires_grad_()
    loss = released_losses.aggregate(matrix, tensor(case["loss_mask"]), case["mode"])
    loss.backward()
    return {"loss": loss, "grad_loss_mat": matrix.grad}


def kl_penalty(case: Case) -> Values:
    logprobs = tensor(case["log_prob"]).requires_grad_()
    kl = losses.kl_penalty(logprobs, tensor(case["ref_log_prob"]), case["kind"])
    kl.sum().backward()
    return {"kl": kl, "grad_log_prob_of_sum": logprobs.grad}


def reward(case: Case) -> Values:
    """The rule reward of the released code, on the whole text."""
    return {
        "output": grading.reference_reward(case["response"], case["ground_truth"]),
        "format_valid": list(grading.check_reference_format(case["response"])),
    }


def math_equiv(case: Case) -> Values:
    values: Values = {"equiv": grading.reference_equal(case["a"], case["b"])}
    compared = None not in (case["a"], case["b"])
    for side in ("a", "b"):
        values[f"{side}_norm"] = grading.reference_normal(case[side]) if compared else None
    return values


def eval_metrics(case: Case) -> Values:
    found = grading.reference_metrics(case["task"], case["prediction"], case["reference"])
    return {"metrics": found}


def eval_extract_answer(case: Case) -> Values:
    return {"prediction": grading.reference_extract(case["text"])}


CHECKS: dict[str, Callable[[Case], Values]] = {
    "agg_loss": agg_loss, "eval_extract_answer": eval_extract_answer, "eval_metrics": eval_metrics,
    "math_equiv": math_equiv, "reward": reward, "entropy_aware_advantage": scaled_advantages,
    "grpo_advantage": grpo_advantage, "kl_penalty": kl_penalty,
    "policy_loss_dual_clip": policy_loss, "policy_loss_entropy_balanced": policy_loss,
    "policy_loss_gspo": gspo, "branch_decision": rollout_checks.branch_decision,
    "dynamic_initial_rollouts": rollout_checks.dynamic_initial_rollouts,
    "response_mask": rollout_checks.masks, "rollout_traces": rollout_checks.rollout_traces,
    "tags_and_rollback": rollout_checks.tags_and_rollback,
    "topk_entropy": rollout_checks.topk_entropy,
}  # fmt: skip


def mismatches(case: Case, values: Values) -> list[str]:
    """Names of the expected figures that are not met; figures the case lacks do not count."""
    bad = []
    for name in values.keys() & case.keys():
        if not isinstance(values[name], Tensor):
            if not same_values(values[name], case[name]):
                bad.append(name)
            continue
        found = values[name].detach().numpy()
        expected = tensor(case[name]).numpy()
        same = found.shape == expected.shape and np.allclose(
            found, expected, RTOL, ATOL, equal_nan=True
        )
        if not same:
            bad.append(name)
    return sorted(bad)


def same_values(found: Any, expected: Any) -> bool:
    """Equal, with floats inside dicts compared within the tolerance."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = found.keys() | expected.keys()
        return all(same_values(found.get(key), expected.get(key)) for key in keys)
    if isinstance(found, float) and isinstance(expected, int | float):
        return bool(np.isclose(found, expected, RTOL, ATOL))
    return bool(found == expected)


def check_file(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the cases that pass, and of those that fail with the figures they miss."""
    passed, failed = [], {}
    content = json.loads(path.read_text())
    shared = {key: value for key, value in content.items() if not key.endswith("cases")}
    cases = [*content["cases"], *content.get("tag_cases", [])]
    for number, case in enumerate(cases, start=1):
        name = case.get("name", f"case {number}")
        bad = mismatches(case, CHECKS[path.stem]({**shared, **case}))
        if bad:
            failed[name] = bad
        else:
            passed.append(name)
    return passed, failed


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        sys.stderr.write(f"{__doc__}\n")
        return 2
    num_passed = num_failed = 0
    for path in sorted(Path(arguments[0]).glob("*.json")):
        if path.stem not in CHECKS:
            sys.stdout.write(f"{path.name}: skipped, not a kind this project checks yet\n")
            continue
        passed, failed = check_file(path)
        lines = [f"  passed {name}" for name in passed]
        lines += [f"  FAILED {name}: {', '.join(bad)}" for name, bad in failed.items()]
        total = len(passed) + len(failed)
        sys.stdout.write("\n".join([f"{path.name}: {len(passed)} of {total} passed", *lines, ""]))
        num_passed, num_failed = num_passed + len(passed), num_failed + len(failed)
    sys.stdout.write(f"{num_passed} passed, {num_failed} failed\n")
    return 1 if num_failed or not num_passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
