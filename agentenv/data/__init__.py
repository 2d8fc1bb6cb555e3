"""Tasks: datasets, their rows and files, the order of a curriculum."""
