"""Full-width layers of the released configuration run on this machine, with dummy weights.

On torch's ops (no compiler is named "none"): they read dummy experts where many share the same numbers, while the
native ops would pack each of them, 7 GB a layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "config-flash.json"
MAX_GIB = 12.0
# One layer of each kind: window only, 2:1 compressed, 1:1 compressed (the boundary).
PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from deepinfer import LLM, SamplingParams

options = {"load_format": "dummy", "layers": (0, 2, 20), "max_num_requests": 2, "max_model_len": 4096}
with LLM(sys.argv[1], **options) as llm:
    outputs = llm.generate([[0, 17, 42]], SamplingParams(temperature=0.0, max_tokens=2))
    logits = llm.score(list(range(3, 7)))
peak_kib = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # ru_maxrss starts at the parent's
report = {
    "tokens": [len(output.token_ids) for output in outputs],
    "errors": [output.error for output in outputs],
    "is_finite": bool(np.isfinite(logits).all()),
    "deviation": float(logits.std()),
    "best": len(set(logits.argmax(-1).tolist())),
    "shape": list(logits.shape),
    "peak_gib": int(peak_kib) / 2**20,
}
print(json.dumps(report))
"""


def test_one_full_width_layer_of_each_kind_runs_within_12_gib(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG.read_bytes())
    source = str(Path(__file__).parents[2] / "src")
    program = f"import sys; sys.path.insert(0, {source!r})\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=1500, check=False, env={**os.environ, "CXX": "none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == [2] and report["errors"] == [None]
    assert report["shape"] == [4, 129280] and report["is_finite"]
    assert 0.1 < report["deviation"] < 100 and report["best"] > 1
    assert report["peak_gib"] < MAX_GIB
