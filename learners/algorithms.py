"""All algorithms by name, as a configuration chooses them."""

from __future__ import annotations

from learners.aepo import AEPO
from learners.arpo import ARPO
from learners.baselines import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO, ReinforcePP

AnyAlgorithm = GRPO | DrGRPO | DAPO | RLOO | ReinforcePP | GSPO | CISPO | ARPO | AEPO
