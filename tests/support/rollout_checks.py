"""Fixtures of the released rollout against `reference.rollout`."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from learners.aepo import sigmoid
from reference import rollout as plan
from reference.algorithms import ReleasedAEPO, ReleasedARPO
from reference.grading import reference_rollback, reference_tag_count
from tests.support.reference_loop import ReferenceLoop, response_mask

Case = dict[str, Any]
Values = dict[str, Any]

PENALTY = 0.05


def branch_decision(case: Case) -> Values:
    draw, weight, base = case["u"], case["entropy_weight"], case["branch_probability"]
    rise, run = case["entropy_now"] - case["entropy_initial"], case["consecutive"]
    keys = {"base_probability": base, "entropy_weight": weight}
    arpo = ReleasedARPO(**keys).plan(2)
    aepo = ReleasedAEPO(**keys, branch_penalty=PENALTY).plan(2)
    return {
        "arpo_branches": arpo.forks(draw, rise, run),
        "arpo_score": plan.arpo_score(draw, rise, weight),
        "arpo_analytic_P": plan.arpo_probability(base, rise, weight),
        "aepo_branches": aepo.forks(draw, rise, run),
        "aepo_score": plan.aepo_score(draw, rise, weight, PENALTY, run),
        "aepo_analytic_P": plan.aepo_probability(base, rise, weight, PENALTY, run),
    }


def dynamic_initial_rollouts(case: Case) -> Values:
    root, steps, beta = case["h_root"], case["step_entropies"], case["beta"]
    mean = fmean(steps) if steps else root
    return {
        "h_avg": mean,
        "sigmoid": sigmoid(beta * (root - mean)),
        "initial_rollouts": plan.initial_rollouts(case["n"], beta, root, steps),
    }


def topk_entropy(case: Case) -> Values:
    per_token = [plan.truncated_entropy(top) for top in case["top_logprobs_per_token"]]
    used = min(len(per_token), plan.WINDOW)
    total = plan.segment_entropy(per_token, case["vocab_size_for_norm"])
    return {
        "tokens_used": used,
        "entropy_reference": total,
        "entropy_mean_per_token": total / used if used else 0.0,
    }


def masks(case: Case) -> Values:
    eos = case["eos"] if isinstance(case["eos"], list) else [case["eos"]]
    return {"mask": [response_mask(row, eos) for row in case["response_ids"]]}


def tags_and_rollback(case: Case) -> Values:
    if "tag" in case:
        return {"count": reference_tag_count(case["text"], case["tag"])}
    return {"rolled_back": reference_rollback(case["text"])}


def rollout_traces(case: Case) -> Values:
    """The whole run replayed; nothing when a pass is not the recorded one."""
    found = ReferenceLoop(case, case["char_vocab"], case["eos"], case["pad"]).replay()
    if found.pop("problems"):
        return dict.fromkeys(found)
    return found
