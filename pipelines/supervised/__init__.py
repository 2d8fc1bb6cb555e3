"""Fine-tuning and preferences: what `agentenv sft` and `agentenv dpo` are composed of."""
