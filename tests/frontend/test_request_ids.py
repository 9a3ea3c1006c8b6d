import pytest

from deepinfer.errors import RequestError
from deepinfer.frontend.request_ids import RequestIds


def test_made_up_ids_are_unique_and_avoid_given_ones():
    ids = RequestIds()
    ids.take("request-1")
    assert [ids.take(), ids.take(), ids.take()] == ["request-0", "request-2", "request-3"]


def test_an_id_is_free_again_after_its_request():
    ids = RequestIds()
    assert ids.take("a") == "a"
    with pytest.raises(RequestError, match="request_id 'a' belongs to a request that is still running; choose another"):
        ids.take("a")
    ids.release("a")
    assert ids.take("a") == "a"
    ids.release("never taken")


@pytest.mark.parametrize("request_id", ["", 3, "x" * 257, b"a"])
def test_ids_of_the_wrong_kind_are_refused(request_id):
    with pytest.raises(RequestError, match="it must be a text of 1 to 256 characters"):
        RequestIds().take(request_id)


def test_further_answers_have_ids_of_their_own_until_each_is_released():
    ids = RequestIds()
    asked = ids.take("asked")
    more = ids.take_more(asked, 2)
    assert len({asked, *more}) == 3 and ids.answers_to(asked) == [asked, *more]
    for name in (asked, *more):
        ids.release(name)
    assert ids.answers_to(asked) == [asked] and not ids._owners and not ids._more
    assert ids.take_more(ids.take("one"), 0) == []
