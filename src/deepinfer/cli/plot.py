"""What the plots of the bench commands share. Matplotlib (the extra `plot`) is loaded only when one is asked for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
PANEL_INCHES = (4.5, 3.6)  # width and height


def add_plot_flag(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --plot, whose value is refused before anything is measured if it could not be drawn."""
    parser.add_argument(
        "--plot", type=_drawable, metavar="FILE", help=f"{meaning} ({', '.join(SUFFIXES)}; needs the extra `plot`)"
    )


def _drawable(text: str) -> Path:
    """The file of a plot. Raises argparse.ArgumentTypeError if it could not be written, or matplotlib is not there."""
    file = Path(text)
    if file.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{str(file.parent)!r} is no folder; make it first")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(
            f"plots need the package {error.name}; install deepinfer with its extra `plot`"
        ) from None
    return file


def new_figure(title: str, num_panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with empty panels side by side. It belongs to no window and no global state of matplotlib."""
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * num_panels, height), layout="constrained")
    figure.suptitle(title)
    panels = [figure.add_subplot(1, num_panels, place + 1) for place in range(num_panels)]
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure, panels


def save(figure: Figure, file: Path) -> None:
    """Write the figure as what the file's name says; texts of an SVG stay texts."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, dpi=150)
