from __future__ import annotations

import pytest

from benchmarks.model_configs import MODEL_CONFIGS, model_folder
from benchmarks.prefix_caching.engine_stand import MANAGERS, EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.schedule_cost import measure_schedule
from benchmarks.shapes import SHAPES
from kvtier.models.config import read_config


@pytest.mark.parametrize("shape", sorted(MODEL_CONFIGS.keys() & SHAPES.keys()))
def test_a_model_config_has_the_kv_of_its_shape(shape):
    assert read_config(MODEL_CONFIGS[shape]).kv_layout() == SHAPES[shape]


@pytest.mark.parametrize("shape", MODEL_CONFIGS)
def test_every_model_config_is_one_the_engine_reads(shape, tmp_path):
    with model_folder(shape) as folder:
        assert read_config(type(tmp_path)(folder)).vocab_size == MODEL_CONFIGS[shape]["vocab_size"]


@pytest.mark.parametrize("hit_rate", [0, 30, 100])
def test_prompts_share_as_much_as_the_hit_rate_says_and_not_a_token_more(hit_rate):
    prompts = PromptMaker(vocab_size=50).make(20, 100, hit_rate)

    shared = [len(set(column)) == 1 for column in zip(*prompts, strict=True)]
    assert all(shared[:hit_rate])
    if hit_rate < 100:
        assert len({prompt[hit_rate] for prompt in prompts}) == 20


def test_every_call_makes_new_prompts():
    maker = PromptMaker(vocab_size=1000)

    assert maker.make(2, 50, 100) != maker.make(2, 50, 100)


def test_all_managers_answer_alike_on_one_stand_and_start_with_an_empty_cache():
    with EngineStand("small", "cpu", max_model_len=256, max_num_requests=4, kv_cache_space=8 << 20) as stand:
        prompts = PromptMaker(stand.vocab_size).make(3, 40, 100)
        rounds = {}
        for manager in MANAGERS:
            stand.use(Variant(manager))
            rounds[manager] = stand.run(prompts, 3)

    assert len({str([answer.token_ids for answer in one.answers]) for one in rounds.values()}) == 1
    assert rounds["naive"].cached_share == 0
    assert rounds["prefix_caching"].cached_share == pytest.approx(2 * 32 / 120)
    assert rounds["yoco"].cached_share == pytest.approx(2 * 39 / 120)


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_scheduler_is_timed_with_every_manager(manager):
    assert 0 < measure_schedule(manager).step_ms < 1000
