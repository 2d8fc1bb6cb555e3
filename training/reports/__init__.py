"""What a training run writes about itself: rows, texts, plots."""
