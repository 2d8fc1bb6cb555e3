"""Fine-tuning and preferences: the parts of `launchers/sft.py` and `launchers/dpo.py`."""
