from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend.stops import StopStrings

texts = st.text("ab<", max_size=24)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=6), max_size=4)


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


@settings(max_examples=500)
@given(text=texts, stops=stop_lists, data=st.data())
def test_any_cut_into_pieces_equals_a_search_of_the_whole_text(text, stops, data):
    matcher, out, rest = StopStrings(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += matcher.add(rest[:size])
        rest = rest[size:]
        assert brute_force(text, stops)[0].startswith(out)  # nothing let through is taken back
    out += matcher.flush()
    assert (out, matcher.match) == brute_force(text, stops)


def feed(stops: list[str], *pieces: str) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    return [matcher.add(piece) for piece in pieces], matcher.match


def test_a_possible_beginning_is_held_back_and_nothing_more():
    assert feed(["END"], "xE", "N", "d") == (["x", "", "ENd"], None)
    assert feed(["END"], "xE", "ND more") == (["x", ""], "END")
    assert feed(["aab"], "aaaa") == (["aa"], None)


def test_the_first_start_wins_even_if_another_is_complete_sooner():
    assert feed(["abcd", "c"], "xabc") == (["x"], None)
    assert feed(["abcd", "c"], "xabc", "d") == (["x", ""], "abcd")
    assert feed(["abcd", "c"], "xabc", "e") == (["x", "ab"], "c")


def test_the_shorter_of_two_at_one_place_is_reported():
    assert feed(["abc", "ab"], "xabc") == (["x"], "ab")


def test_what_the_end_leaves_open_is_settled_by_flush():
    matcher = StopStrings(["abcd", "c"])
    assert matcher.add("xabc") == "x"
    assert (matcher.flush(), matcher.match) == ("ab", "c")
    matcher = StopStrings(["END"])
    assert (matcher.add("xEN"), matcher.flush(), matcher.match) == ("x", "EN", None)


def test_no_stops_let_everything_through():
    assert feed([], "abc", "") == (["abc", ""], None)


def test_text_after_a_match_is_dropped():
    assert feed(["b"], "ab", "cd") == (["a", ""], "b")


@settings(max_examples=500)
@given(text=texts, stops=stop_lists, early=st.integers(0, 24), keeps=st.booleans(), data=st.data())
def test_ends_in_the_early_part_do_not_count_and_a_match_may_be_kept(text, stops, early, keeps, data):
    early = min(early, len(text))
    found = [(start, len(s), s) for s in stops if (start := text.find(s, max(0, early - len(s) + 1))) >= 0]
    start, length, stop = min(found, default=(len(text), 0, None))
    expected = text[: start + keeps * length]
    matcher, out, place = StopStrings(stops, keeps_match=keeps), "", 0
    while place < len(text):
        end = place + data.draw(st.integers(1, (early if place < early else len(text)) - place))
        out += matcher.add(text[place:end], may_end=place >= early)
        place = end
        assert expected.startswith(out)
    out += matcher.flush()
    assert (out, matcher.match) == (expected, stop)
