"""The score of a step: useful training per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.rollout.metrics import Metrics


def step_score(
    delivered: Sequence[TrajectoryTree],
    trained: Sequence[CreditedTree],
    *,
    policy_version: int,
    seconds: float,
    groups_per_step: int,
    num_known: Mapping[int, int],
) -> Metrics:
    """The score of a step, a measure of useful training per second, and its factors.

        score = accepted tokens per second x freshness x batch factor

        accepted tokens   sampled tokens of the trees that a step trained, shared ones once, whose
                          advantage is not 0: discarded and failed ones and those without a signal
                          do not count, nor those that a resumed run found in its journal
        freshness         1 / (1 + s), s: the mean staleness of those tokens, in published versions
        batch factor      trees with a signal over `queue.groups_per_step`, at most 1

    The product, without discarded tokens and tokens without variance, is the score that the
    autotuner of OpenPipe/ART maximizes (its pull request 758). The two factors are defined here:
    the published package (0.5.18) does not contain that tuner, so values are not comparable with
    ART's.

    The step took `seconds` of wall time. `policy_version` is the learner's before the update;
    `num_known` gives by a tree's index how many of its first nodes an earlier process grew, in
    seconds that are not counted here. Also flow/filtered_tokens: the share of the sampled tokens of
    the `delivered` trees that were in none of the `trained` ones, which have a signal each.
    """
    num_accepted = num_new = sum_ages = 0
    for tree, credit in trained:
        first_new = num_known.get(tree.index, 0)
        for index, node in enumerate(tree.nodes):
            if credit.adv_pos[index] or credit.adv_neg[index]:
                num_accepted += len(node.action_ids)
                num_new += len(node.action_ids) * (index >= first_new)
                for span in node.version_spans:
                    age = max(0, policy_version - span.version)  # of a lost checkpoint: 0
                    sum_ages += (span.end - span.start) * age
    num_sampled = sum(map(_num_sampled, delivered))
    num_trained = sum(_num_sampled(tree) for tree, _ in trained)
    rate = num_new / seconds if seconds else 0.0
    freshness = num_accepted / (num_accepted + sum_ages) if num_accepted else 0.0
    factor = min(1.0, len(trained) / groups_per_step)
    return {
        "score/value": rate * freshness * factor,
        "score/accepted_tokens_per_s": rate,
        "score/freshness": freshness,
        "score/batch_factor": factor,
        "flow/filtered_tokens": 1 - num_trained / num_sampled if num_sampled else 0.0,
    }


def _num_sampled(tree: TrajectoryTree) -> int:
    return sum(len(node.action_ids) for node in tree.nodes)
