"""Both ways to form sums; plain code stands in for tiles that the processor lacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.cpu import pair


@pytest.fixture(params=["vectors", "tiles"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with pair.tiles(request.param == "tiles"):
        yield request.param
