"""From messages to tokens and back: prompts, templates, tags, calls."""
