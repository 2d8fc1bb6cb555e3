"""Tool environments and what they are made of. Importing this package only registers them."""

from agentenv.env import register

register("agentenv/Quickstart-v0", "envs.quickstart:QuickstartEnv")
