"""What the doctor looks at: a configuration of training, and its parts as a run builds them."""

from __future__ import annotations

from typing import NamedTuple

from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.parts import TrainingAssembly


class Patient(NamedTuple):
    """`is_offline`: nothing outside this machine is asked. `is_quick`: learner and engine are not
    started."""

    config: TrainConfig
    assembly: TrainingAssembly
    is_offline: bool = False
    is_quick: bool = False
