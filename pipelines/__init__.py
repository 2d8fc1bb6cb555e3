"""The work of the commands: training, evaluation, fine-tuning, viewing, exports, checks."""
