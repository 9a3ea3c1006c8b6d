from pathlib import Path

from deepinfer.config import fields
from deepinfer.config.docs import options_page
from deepinfer.config.engine import EngineConfig
from deepinfer.sampling.params import SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def page():
    return options_page(fields.read_groups(EngineConfig), fields.read_options(SamplingParams))


def test_page_has_a_row_for_every_option():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    groups = fields.read_groups(EngineConfig)
    assert len(rows) == sum(map(len, groups.values())) + len(fields.read_options(SamplingParams))
    assert sum("`DEEPINFER_HF_MODEL_DIR`, `DEEPINFER_MODEL`" in row for row in rows) == 1


def test_options_page_is_current():
    assert PAGE.read_text() == page(), "docs/options.md is old; renew it: deepinfer options > docs/options.md"
