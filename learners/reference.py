"""The reference policy of a KL term: a frozen copy of the policy, built only when one is asked."""

from __future__ import annotations

import copy
from typing import Any

from agentenv.errors import ConfigError
from learners.policy import Policy


def frozen_copy(policy: Policy) -> Policy:
    """The same weights on their own, without gradient, on the same device.

    Raises ConfigError where a rank holds only a part of each weight (ZeRO stage 3).
    """
    if any(hasattr(param, "ds_id") for param in policy.parameters()):
        raise ConfigError(
            "algorithm.kl_loss and kl_reward need a reference policy, which ZeRO stage 3 cannot "
            "copy; set learner.zero_stage to 2 or less"
        )
    frozen = copy.deepcopy(policy).requires_grad_(False).eval()
    for param in frozen.parameters():
        param.grad = None
    return frozen


class Reference:
    """Built on first use, so that it is the policy that RL starts from, and renewed every
    `every` updates (0: never)."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.policy: Policy | None = None
        self.num_updates = 0

    def begin_update(self, policy: Policy) -> Policy:
        """The reference of the update that begins; `policy` has the weights at its start."""
        due = self.every and self.num_updates and self.num_updates % self.every == 0
        if self.policy is None:
            self.policy = frozen_copy(policy)
        elif due:
            self.policy.load_state_dict(policy.state_dict())
        self.num_updates += 1
        return self.policy

    def state(self) -> dict[str, Any]:
        """What `load` needs to go on with the same reference."""
        weights = None if self.policy is None else self.policy.state_dict()
        return {"weights": weights, "num_updates": self.num_updates}

    def load(self, state: dict[str, Any], policy: Policy) -> None:
        """Go on from `state`; `policy` gives the shape."""
        self.num_updates, self.policy = state["num_updates"], None
        if state["weights"] is not None:
            self.policy = frozen_copy(policy)
            self.policy.load_state_dict(state["weights"])
