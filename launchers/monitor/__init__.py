"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, or a monitor of your own.

`base.py` is the seam: a monitor is a class with three methods. `monitors.py` runs them.
"""
