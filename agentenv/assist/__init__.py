"""Tool-Star's inference-time tools (arXiv 2505.16410, appendix), for evaluation only.

    code debugger    around a tool that runs code: a model corrects a cell that failed
    backtracer       around a rollout: a turn whose call failed is taken again from before it
    chain refiner    around a rollout: a model compresses what is written once it is long

The browser agent is `search.mode = "summaries"` (envs/search/service.py). `assist_actor` gives an
actor these; it needs no other env, renderer or engine.
"""

from agentenv.assist.helpers import Assist, AssistConfig
from agentenv.assist.rollout import assist_actor

__all__ = ["Assist", "AssistConfig", "assist_actor"]
