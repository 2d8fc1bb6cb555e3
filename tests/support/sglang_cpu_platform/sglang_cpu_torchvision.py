"""Makes the torchvision of PyPI, linked against CUDA, importable with a CPU build of torch.

SGLang imports torchvision unconditionally. Its compiled library cannot be loaded here, and then its
Python code fails because it describes undeclared operators. They are declared, not implemented: a
text model never calls one.
"""

import torch

BOX_OPERATORS = ("nms", "qnms")
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_library = torch.library.Library("torchvision", "FRAGMENT")


def declare() -> None:
    """Declare the operators; to be called once in a process, before torchvision is imported."""
    for name in BOX_OPERATORS:
        _library.define(name + BOXES)
