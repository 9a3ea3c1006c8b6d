"""Small random models of any geometry agree with the oracle at every position."""

from __future__ import annotations

from pathlib import Path
from random import Random

import make_checkpoint
import numpy as np
import pytest
from v41_oracle import Oracle

import goldens
from deepinfer import LLM

NUM_TOKENS = 75
# A last-bit difference may turn one cached value by a whole fp8 or fp4 step, which moves all later
# positions a little. The smallest mistake in the architecture costs a median of 1e-3, most 0.1.
MEDIAN_BOUND, WORST_BOUND = 1e-4, 5e-2


def draw_schedule(random: Random) -> dict[str, object]:
    """Ratios, sources and candidates in arbitrary places, by the rules of the config page."""
    ratios: list[int] = [0] * random.randint(0, 2)
    kv_sources: list[int] = []
    index_sources: list[int] = []
    for _ in range(random.randint(1, 3)):
        ratio = random.choice([1, 1, 2, 2, 3, 4, 5])
        kv_sources.append(len(ratios))
        index_sources.append(len(ratios))
        ratios.append(ratio)
        for _ in range(random.randint(0, 2)):
            if random.random() < 0.5:
                index_sources.append(len(ratios))
            ratios.append(random.choice([ratio, ratio, ratio, 0]))
            if not ratios[-1] and index_sources[-1] == len(ratios) - 1:
                index_sources.pop()
    last_group = [layer for layer in index_sources if layer >= kv_sources[-1]]
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv_sources,
        "index_source_layer_ids": index_sources,
        "candidate_source_layer_id": random.choice([None, last_group[0]]),
        "engram_layer_ids": sorted(random.sample(range(len(ratios)), random.randint(0, 2))),
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [len(ratios) - 1],
    }


def draw_shape(seed: int) -> dict[str, dict[str, object]]:
    random = Random(seed)
    text: dict[str, object] = dict(make_checkpoint.SHAPES["nano"]["text"])
    text |= draw_schedule(random)
    text |= {
        "hidden_size": random.choice([32, 64, 96]),
        "moe_intermediate_size": random.choice([32, 64]),
        "num_attention_heads": random.choice([2, 4, 6]),
        "head_dim": random.choice([32, 64]),
        "qk_rope_head_dim": random.choice([2, 16, 32]),
        "q_lora_rank": random.choice([32, 64]),
        "o_lora_rank": random.choice([32, 64]),
        "o_groups": random.choice([1, 2]),
        "swiglu_limit": random.choice([0.0, 2.0]),
        "sliding_window": random.choice([random.randint(1, 20), random.randint(50, 80)]),
        "index_topk": random.choice([random.randint(1, 20), random.randint(50, 80)]),
        "index_n_heads": random.choice([1, 3, 8]),
        "index_head_dim": random.choice([32, 64]),
        "candidate_topk_blocks": random.randint(1, 4),
        "candidate_block_size": random.randint(1, 9),
        "n_routed_experts": (experts := random.randint(2, 8)),
        "num_experts_per_tok": random.randint(1, experts),
        "norm_topk_prob": random.random() < 0.5,
        "scoring_func": random.choice(["sqrtsoftplus", "softmax", "sigmoid"]),
        "hc_mult": random.choice([1, 2, 4]),
        "hc_sinkhorn_iters": random.choice([1, 20]),
        "engram_max_ngram_size": random.randint(2, 4),
    }
    return {"text": text, "vision": make_checkpoint.SHAPES["nano"]["vision"]}


@pytest.mark.parametrize("seed", range(24))
def test_logits_of_a_random_model_agree_with_the_oracle(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(make_checkpoint.SHAPES, "random", draw_shape(seed))
    make_checkpoint.make_checkpoint("random", tmp_path, seed)
    tokens = np.random.default_rng(seed).integers(3, 600, NUM_TOKENS).tolist()
    golden = Oracle(tmp_path, "float32").forward(tokens).logits.numpy()
    with LLM(
        tmp_path, precision="float32", max_num_requests=4, max_chunk_tokens=Random(seed).choice([None, 1, 5, 32])
    ) as llm:
        difference = goldens.relative_difference(llm.score(tokens), golden)
    assert np.median(difference) <= MEDIAN_BOUND
    assert difference.max() <= WORST_BOUND
