"""Runs a program that can import the package, whether or not it is installed."""

import os
import subprocess
from pathlib import Path

from waiting import PATIENCE

SOURCE = str(Path(__file__).parents[2] / "src")


def run_process(words, **settings):
    """The finished process of these words, output as text; `settings` go to subprocess.run."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment, **settings)
