"""Every benchmark can be imported without a card and says what its arguments are."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
# In one process, since most of the time goes to importing torch; prints the files that fail.
ASK_ALL = """
import contextlib, io, os, runpy, sys
for file in sys.argv[1:]:
    folder = os.path.dirname(file)
    sys.path.insert(0, folder)
    before, sys.argv, words = set(sys.modules), [file, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(words):
            runpy.run_path(file, run_name="__main__")
        print(file, "went on after --help")
    except SystemExit as end:
        if end.code or "usage:" not in words.getvalue():
            print(file, "ended with", end.code)
    except ModuleNotFoundError as error:
        if error.name not in ("humming", "litellm"):  # what they compare with need not be installed
            print(file, repr(error))
    except Exception as error:
        print(file, repr(error))
    sys.path.remove(folder)
    for name in set(sys.modules) - before:  # files of one name in two folders
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
"""


def test_every_benchmark_answers_to_help():
    files = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "__main__" in path.read_text()]
    files = [str(path) for path in files if path.parent.name != "peers" or not path.name.startswith("run_")]
    assert len(files) > 20
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL, *files],
        capture_output=True, text=True, timeout=PATIENCE, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
