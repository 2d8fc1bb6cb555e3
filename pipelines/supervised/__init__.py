"""Fine-tuning and preferences: what `launchers/sft.py` and `launchers/dpo.py` are composed of."""
