"""The quick start: a small world of facts, its environment, and the set-up of its runs."""

from agentenv.envs.quickstart.world import QuickstartEnv as QuickstartEnv
from agentenv.envs.quickstart.world import scripted_turn as scripted_turn
