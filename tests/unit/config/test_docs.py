from pathlib import Path

from deepinfer.cli.options import page
from deepinfer.config import fields
from deepinfer.config.engine import EngineConfig
from deepinfer.config.serve import ServeOptions
from deepinfer.sampling.params import SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_page_has_a_row_for_every_option():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    settings = (*fields.read_groups(EngineConfig).values(), fields.read_options(ServeOptions))
    assert len(rows) == sum(map(len, settings)) + len(fields.read_options(SamplingParams))
    assert sum("`DEEPINFER_HF_MODEL_DIR`, `DEEPINFER_MODEL`" in row for row in rows) == 1


def test_options_page_is_current():
    assert PAGE.read_text() == page(), "docs/options.md is old; renew it: deepinfer options > docs/options.md"
