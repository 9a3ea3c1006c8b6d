import pytest

import deepinfer


@pytest.mark.parametrize("name", deepinfer.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(deepinfer, name) is not None


def test_unknown_name_is_refused_with_the_list():
    with pytest.raises(AttributeError, match="has no attribute 'Llm'; it exports LLM"):
        deepinfer.Llm  # noqa: B018
