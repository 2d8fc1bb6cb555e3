"""All algorithms by name, as a configuration chooses them."""

from __future__ import annotations

from learners.aepo import AEPO
from learners.arpo import ARPO
from learners.cispo import CISPO
from learners.dapo import DAPO
from learners.dr_grpo import DrGRPO
from learners.grpo import GRPO
from learners.gspo import GSPO
from learners.reinforce_pp import ReinforcePP
from learners.rloo import RLOO

AnyAlgorithm = GRPO | DrGRPO | DAPO | RLOO | ReinforcePP | GSPO | CISPO | ARPO | AEPO
