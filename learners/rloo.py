"""RLOO: REINFORCE with the other trajectories of the group as baseline."""

from __future__ import annotations

from learners.algorithm_keys import AggregationKey
from learners.clipped import Clipped
from learners.credit import Floats, leave_one_out


class RLOO(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rloo"):
    """REINFORCE leave-one-out (Ahmadian 2024, arXiv 2402.14740).

        A_i = R_i - mean of the other returns of the group
        J = 1/N sum_i sum_t r A_i

    A trajectory is one action, so its tokens add up (seq-mean-token-sum). Differs from the paper:
    the ratio is clipped as in PPO, since one update takes several steps on asynchronous data; on
    the first step on fresh data r = 1, and the gradient is REINFORCE's. The paper's KL in the
    reward is kl_reward.
    """

    aggregation: AggregationKey = "seq-mean-token-sum"

    def advantages(self, returns: Floats) -> Floats:
        return leave_one_out(returns)
