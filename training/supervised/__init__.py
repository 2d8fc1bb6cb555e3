"""Fine-tuning and preferences: the parts of `agentenv sft` and `agentenv dpo`."""
