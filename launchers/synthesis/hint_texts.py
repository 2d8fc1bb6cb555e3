"""Where hints may go by default, and what they say."""

PHRASES = (
    "wait", "hmm", "maybe", "perhaps", "possibly", "probably", "alternatively", "not sure",
    "not certain", "unsure", "uncertain", "unclear", "i think", "i believe", "i guess", "i assume",
    "i recall", "if i remember", "might be", "could be", "i do not know", "i don't know",
    "i am not familiar", "i'm not familiar",
)  # fmt: skip
VERIFICATION = (
    "I am not certain of this step. Before I build on it, I should verify it with a tool.",
    "This step could be wrong, so let me check it with a tool instead of guessing.",
    "I only have this from memory. A tool can settle it, so I will use one now.",
)
REFLECTION = (
    "I have not confirmed this answer yet, so let me check the deciding step with a tool.",
    "Before I give this answer, let me reflect on it and confirm or correct it with a tool.",
    "Looking back, part of this rests on a guess. A tool can tell whether it holds.",
)
