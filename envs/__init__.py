"""Tool environments and their parts.

An installed agentenv registers these ids by its entry points (pyproject.toml); here they are
registered for a bare checkout.
"""

from agentenv.contract.env_registry import register

register("agentenv/Quickstart-v0", "agentenv.envs.quickstart:QuickstartEnv")
register("agentenv/CodeInterpreter-v0", "agentenv.envs.code_interpreter:CodeInterpreterEnv")
register("agentenv/WebSearch-v0", "agentenv.envs.web_search:WebSearchEnv")
register("agentenv/QAGrader-v0", "agentenv.envs.qa_grader:QAGraderEnv")
register("agentenv/DeepSearch-v0", "agentenv.envs.deep_search:DeepSearchEnv")
register("agentenv/Program-v0", "agentenv.envs.program:ProgramEnv")
register("agentenv/Gymnasium-v0", "agentenv.envs.bridges.gymnasium_env:GymnasiumEnv")
register("agentenv/OpenEnv-v0", "agentenv.envs.bridges.openenv:OpenEnv")
register("agentenv/Verifiers-v0", "agentenv.envs.bridges.verifiers_env:VerifiersEnv")
