"""docs/sampling.md says what the class says."""

from pathlib import Path

from deepinfer.config import fields
from deepinfer.config.docs import options_page
from deepinfer.sampling.params import MAX_BAD_WORD_TOKENS, SamplingParams, declared

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sampling.md").read_text()


def rows(page, first_column):
    """Name -> cells of the table whose head begins with this."""
    lines = page.partition(f"| {first_column} |")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    return {row[0].strip("| `"): row[1:] for row in cells}


def test_every_parameter_is_there_with_its_default_and_range():
    generated = options_page({}, fields.read_options(SamplingParams))
    expected = {name: (cells[1], cells[2]) for name, cells in rows(generated, "option").items()}
    found = {name: (cells[0].replace("`()`", ""), cells[1]) for name, cells in rows(PAGE, "parameter").items()}
    assert found == expected and list(found) == [spec.name for spec in declared()]


def test_other_names_and_bounds_in_the_text_are_those_of_the_class():
    meanings = {name: cells[2] for name, cells in rows(PAGE, "parameter").items()}
    for spec in declared():
        for other in spec.metadata["names"]:
            assert f"Also `{other}`" in meanings[spec.name]
    assert f"in at most {MAX_BAD_WORD_TOKENS} tokens" in meanings["bad_words"]
