"""What a run or an evaluation recorded, in the formats of others; and without secrets."""
