"""Training: reinforcement learning, SFT, DPO, and their workers."""
