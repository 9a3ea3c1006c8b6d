import json

import pytest

from deepinfer.errors import ConfigError
from deepinfer.model.v41.memory_plan import GIB, memory_plan
from model_configs import config

KEPT_TWICE = "kept as e4m3 too (Hopper)"


def test_experts_and_tables_are_split_and_the_rest_is_on_every_rank():
    one, many = (memory_plan(config("released"), 131, ranks, 131_072).weight_bytes for ranks in (1, 64))
    assert one["experts"] == 64 * many["experts"] == 40 * 384 * 18_800_640
    assert one["engram tables"] == 768_022_850 * 264
    assert many["engram tables"] == -(-768_022_850 // 64) * 264
    assert one["attention"] == many["attention"] and one["head"] == many["head"]


def test_uneven_ranks_are_planned_by_the_fullest():
    assert (
        memory_plan(config("golden"), 1, 3).weight_bytes["experts"] * 8
        == 3 * (memory_plan(config("golden"), 1, 1).weight_bytes["experts"])
    )


def test_requests_and_blocks_fill_what_is_left():
    plan = memory_plan(config("released"), 131, 64, 131_072)
    assert plan.fits and plan.bytes_per_request == 1024 * 113_920 + 43 * 528 * 133 + 3 * 7 * 4096 + 48
    assert plan.num_requests == plan.cache_bytes // plan.bytes_per_request == 876
    assert plan.num_blocks >= plan.num_requests * 1024
    assert plan.num_cache_tokens == plan.num_blocks * 128
    used = sum(plan.weight_bytes.values()) + plan.reserved_bytes + plan.num_requests * plan.bytes_per_request
    assert plan.device_bytes - plan.bytes_per_request - 3 * GIB // 1024 < used < plan.device_bytes == 131 * GIB


def test_what_a_hopper_card_keeps_twice_is_counted():
    """Experts of 40 layers and 3 draft blocks on 64 ranks and none on 8, and the output matrix."""
    layer, draft = (count * 5120 * (4608 + 2304) for count in (384 // 64, 128 // 64))
    plans = [memory_plan(config("released"), 139.8, ranks) for ranks in (64, 8)]
    copied = [plan.weight_bytes.get(KEPT_TWICE, 0) for plan in plans]
    output = 129_280 * 5120
    assert copied == [40 * layer + 3 * draft + output, output]
    assert KEPT_TWICE not in memory_plan(config("released").cut([0, 1]), 10, 64).weight_bytes
    room = layer * 400 / GIB
    for gib, kept in ((room + 1e-3, copied[0]), (room - 1e-3, 3 * draft + output)):
        assert memory_plan(config("released"), gib, 64).weight_bytes[KEPT_TWICE] == kept


def test_model_that_does_not_fit_says_what_is_missing():
    plan = memory_plan(config("released"), 80, 4)
    assert not plan.fits and (plan.num_requests, plan.num_blocks, plan.num_cache_tokens) == (0, 0, 0)
    assert plan.cache_bytes < 0
    assert plan.as_text().splitlines()[-1].startswith("does not fit; missing for one request")


def test_text_and_dict_agree():
    plan = memory_plan(config("nano"), 1, context_tokens=1024)
    assert json.loads(json.dumps(plan.as_dict()))["num_requests"] == plan.num_requests
    assert f"requests of 1,024 tokens  {plan.num_requests:>10,}".split()[-1] in plan.as_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1, 128), "device size is 0"), ((80, 0, 128), "rank count is 0"), ((80, 1, 0), "context is 0 tokens"),
     ((80, 1, 2**21), "this model takes 1 to 1048576"), ((float("nan"), 1, 1), "device size is nan")],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        memory_plan(config("released"), *arguments)
