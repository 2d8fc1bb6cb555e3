"""Resource plan of a run (`--dry-run`), and checks of a machine and a configuration (`agentenv
doctor`).
"""
