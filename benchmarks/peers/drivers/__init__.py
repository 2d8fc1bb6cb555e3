"""The code of a rollout of each peer, at the work of work.py, for the interpreter of the peer."""
