import pytest

from deepinfer.model.tables import aligned, count, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (890, "890 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2048 * 2**30, "2,048.00 GiB")],
)
def test_size_takes_the_unit_that_fits(num_bytes: int, text: str):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (1500, "1.5 K"), (18_612_224, "18.61 M"), (543_581_798_400, "543.58 B")]
)
def test_count_takes_the_unit_that_fits(number: int, text: str):
    assert count(number) == text


def test_columns_line_up_and_lines_end_without_blanks():
    assert aligned([("part", "size", ""), ("a", "10", "x")]) == "part  size\na       10  x"
