"""On-policy distillation: the teacher alone, without returns. No torch."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agentenv.base.errors import ConfigError
from agentenv.learners.algorithms.algorithm import Clipped, TeachKey
from agentenv.learners.algorithms.credit import Floats


class Distill(Clipped, frozen=True, kw_only=True, tag="distill"):
    """On-policy distillation (Agarwal 2024, GKD, arXiv 2306.13649, eq. 4 with lambda = 1 and the
    reverse KL).

        J = -mean over the policy's own tokens of KL(policy || teacher)

    estimated by the sampled token: its dense advantage is log teacher - log policy. Returns do not
    count, so that a trajectory needs no group (group_size = 1). Differs from the paper: the ratio
    is clipped as in PPO, so that the trees of older weights can be used.
    """

    teach: TeachKey = 1.0
    least_group_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teach:
            raise ConfigError("algorithm.teach = 0: distill learns from the teacher alone")

    def advantages(self, returns: Floats) -> Floats:
        return np.zeros_like(returns)
