"""Diagnosis: what `agentenv doctor` is composed of."""
