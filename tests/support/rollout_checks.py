"""Fixtures of the released rollout against `agentenv.reference.algorithms`."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from agentenv.learners.algorithms.aepo import penalty_factor, sigmoid
from agentenv.learners.algorithms.arpo import clip_probability
from agentenv.reference import algorithms as plan
from agentenv.reference.algorithms import ReleasedAEPO, ReleasedARPO
from tests.support.reference_loop import ReferenceLoop, response_mask, truncated_entropy

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
        "arpo_analytic_P": arpo_probability(base, rise, weight),
        "aepo_branches": aepo.forks(draw, rise, run),
        "aepo_score": plan.aepo_score(draw, rise, weight, PENALTY, run),
        "aepo_analytic_P": aepo_probability(base, rise, weight, PENALTY, run),
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
    per_token = [truncated_entropy(top) for top in case["top_logprobs_per_token"]]
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
        return {"count": tag_count(case["text"], case["tag"])}
    return {"rolled_back": rollback(case["text"])}


def rollout_traces(case: Case) -> Values:
    """The whole run replayed; nothing when a pass is not the recorded one."""
    found = ReferenceLoop(case, case["char_vocab"], case["eos"], case["pad"]).replay()
    return dict.fromkeys(found) if found.pop("problems") else found


def arpo_probability(base: float, rise: float, weight: float) -> float:
    """Probability of a fork over uniform draws."""
    return clip_probability(base + weight * rise)


def aepo_probability(base: float, rise: float, weight: float, penalty: float, run: int) -> float:
    """The same for AEPO: 1 - p in place of p at a rise of 0."""
    factor = penalty_factor(penalty, run)
    if factor == 0.0:
        return float(base <= 0.0)
    return clip_probability(1.0 - base / factor + weight * rise)


def tag_count(text: str, tag: str) -> int:
    """Opening tags that a closing tag follows, read from left to right, not nested."""
    count = place = 0
    while (start := text.find(f"<{tag}>", place)) >= 0:
        end = text.find(f"</{tag}>", start)
        if end < 0:
            break
        count, place = count + 1, end + len(tag) + 3
    return count


def rollback(text: str) -> str:
    """Tool-Star's backtracer (evaluation/tools/rollback_code.py): it removes the last Python call,
    a thought that ends right before it, and the rest of its line; without a call the text stays."""
    before, call, _ = text.rpartition("<python>")
    if not call:
        return text
    kept = before.rstrip(" \n").removesuffix("</think>").rstrip(" \n")
    return kept[: kept.rfind("\n") + 1]
