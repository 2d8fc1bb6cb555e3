"""Pictures of runs and evaluations: panels with one look, drawn without a display."""

from __future__ import annotations

from io import BytesIO
from typing import Any


def panels(
    num_rows: int, num_columns: int, size: tuple[float, float], title: str = ""
) -> tuple[Any, list[Any]]:
    """A figure of `size` (width and height in inches) and its axes, row by row, with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, found


CHARS_PER_INCH = 19.0  # of a small font


def png(figure: Any, dpi: int = 110) -> bytes:
    """The figure as a PNG file; axes with labels and without a legend get one below them, where it
    covers no curve."""
    for axes in figure.axes:
        _, labels = axes.get_legend_handles_labels()
        if labels and axes.get_legend() is None:
            width, height = figure.get_size_inches() * axes.get_position().size
            fitting = int(CHARS_PER_INCH * width / (max(map(len, labels)) + 6))  # and its line
            axes.legend(
                fontsize="small",
                loc="upper center",
                bbox_to_anchor=(0.5, -(0.45 if axes.get_xlabel() else 0.25) / height),
                ncols=max(1, min(fitting, len(labels))),
                frameon=False,
            )
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
