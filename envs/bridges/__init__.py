"""Environments and tools of others: verifiers, OpenEnv, MCP servers, reasoning-gym."""
