"""Tokens follow the exact distribution, and a row's token does not depend on the rows beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch

from kvtier.engine.device.sampler import SampledTokens, Sampler
from kvtier.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 12
EOS = 3
CHI_SQUARE_BOUND = 31.3
"""One in a thousand exceeds it at 11 degrees of freedom; seeds are fixed, so what passes goes on passing."""


def new_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size=vocab_size, device=CPU, eos_token_ids=(EOS,))


def sample_once(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> SampledTokens:
    sampler = new_sampler(logits.shape[1])
    rows = [sampler.open(one, prompt_token_ids=[1, 2]) for one in params]
    return sampler.sample(logits.clone(), sampler.batch(rows, positions))


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The definition on plain numbers: temperature, min_p, top_k, top_p."""
    scores = [score / params.temperature for score in logits.tolist()]
    weights = {token: math.exp(score - max(scores)) for token, score in enumerate(scores)}
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p}
    ranked = sorted(weights, key=lambda token: -weights[token])[: params.top_k or len(scores)]
    total, kept, mass = sum(weights[token] for token in ranked), [], 0.0
    for token in ranked:
        if mass < params.top_p * total:
            kept.append(token)
        mass += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scores))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05),
        SamplingParams(top_k=1),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=1e-6),
    ],
)
def test_tokens_follow_the_exact_distribution(params: SamplingParams) -> None:
    logits, num_draws = random_logits(1), 20_000
    expected = torch.tensor(expected_probabilities(logits[0], params)) * num_draws

    seeded = [msgspec.structs.replace(params, seed=seed) for seed in range(num_draws)]
    tokens = sample_once(logits.expand(num_draws, -1), seeded, [0] * num_draws).token_ids

    found = torch.bincount(tokens, minlength=VOCAB)
    possible = expected > 0
    assert found[~possible].sum() == 0
    assert ((found - expected)[possible] ** 2 / expected[possible]).sum() < CHI_SQUARE_BOUND


def test_one_seeds_tokens_follow_the_exact_distribution_over_positions() -> None:
    logits, num_draws = random_logits(1), 20_000
    expected = torch.softmax(logits[0], -1) * num_draws
    params = SamplingParams(seed=1234)

    tokens = sample_once(logits.expand(num_draws, -1), [params] * num_draws, range(num_draws)).token_ids

    found = torch.bincount(tokens, minlength=VOCAB)
    assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE_BOUND


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=3),
    SamplingParams(seed=3, top_p=0.5),
    SamplingParams(seed=4, min_p=0.3, temperature=1.7),
    SamplingParams(seed=5, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(seed=6, top_k=7, top_p=0.9, presence_penalty=1.0),
    SamplingParams(seed=7, min_tokens=8, stop_token_ids=(5,)),
    SamplingParams(temperature=0, repetition_penalty=3.0),
    SamplingParams(seed=8, logprobs=3),
]


def test_a_row_gets_the_same_tokens_alone_and_in_any_batch() -> None:
    num_steps, vocab_size = 12, 500
    steps = [random_logits(len(MIXED), vocab_size, seed=step) for step in range(num_steps)]

    def run(indices: list[int]) -> torch.Tensor:
        sampler = new_sampler(vocab_size)
        rows = [sampler.open(MIXED[index], prompt_token_ids=[1, 2, 7]) for index in indices]
        batch = sampler.batch(rows, [0] * len(rows))
        return torch.stack([sampler.sample(step[indices].clone(), batch).token_ids for step in steps], dim=1)

    together = run(list(range(len(MIXED))))
    backwards = run(list(range(len(MIXED)))[::-1])

    assert torch.equal(together, backwards.flip(0))
    for index in range(len(MIXED)):
        assert torch.equal(together[index], run([index])[0]), MIXED[index]


def test_a_seed_gives_the_same_tokens_whenever_the_batch_is_built() -> None:
    steps = [random_logits(1, seed=step) for step in range(8)]
    sampler = new_sampler()
    row = sampler.open(SamplingParams(seed=-9), [1])
    kept = sampler.batch([row], [0])

    for position, logits in enumerate(steps):
        rebuilt = sampler.batch([row], [position])
        assert torch.equal(
            sampler.sample(logits.clone(), kept).token_ids, sampler.sample(logits.clone(), rebuilt).token_ids
        )


def test_seeds_differ_and_requests_without_one_get_their_own() -> None:
    logits = torch.zeros(1, 1000)

    def tokens(seed: int | None) -> list[int]:
        params = SamplingParams(seed=seed)
        return sample_once(logits.expand(20, -1), [params] * 20, range(20)).token_ids.tolist()

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(-1) == tokens((1 << 64) - 1)
    assert tokens(None) != tokens(None)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [4, 9]] = 1.0
    logits[2, [11, 2]] = 5.0
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1e-9), SamplingParams(temperature=0)]

    assert sample_once(logits, params, [0, 0, 0]).token_ids.tolist() == [0, 4, 2]
    assert sample_once(logits, [*params[:2], SamplingParams(top_k=1)], [0, 0, 0]).token_ids[:2].tolist() == [0, 4]


def test_ties_with_the_last_kept_score_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(2000, -1)

    tokens = sample_once(logits, [SamplingParams(top_k=2)] * 2000, range(2000)).token_ids

    assert sorted(set(tokens.tolist())) == [0, 1, 2]


def test_penalties_agree_with_plain_numbers() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6)
    prompt, output = [1, 2, 7], []
    sampler = new_sampler()
    batch = sampler.batch([sampler.open(params, prompt)], [0])
    for step in range(30):
        logits = random_logits(1, seed=step // 10)
        scores = logits[0].tolist()
        for token in {*prompt, *output}:
            scores[token] *= 1 / 1.3 if scores[token] > 0 else 1.3
        for token in set(output):
            scores[token] -= 0.4 + 0.6 * output.count(token)
        expected = max(range(VOCAB), key=lambda token: scores[token])

        token = sampler.sample(logits, batch).token_ids.item()

        assert token == expected
        output.append(token)
    assert len(set(output)) > 3


def test_a_request_taken_in_with_output_continues_its_penalties() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.5)
    sampler = new_sampler()
    row = sampler.open(params, [1], output_token_ids=[4, 4])
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6] = 2.9, 0.1

    assert sampler.sample(logits, sampler.batch([row], [2])).token_ids.tolist() == [6]
    sampler.close(row)


def test_ends_are_suppressed_until_min_tokens() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 5] = 9.0, 8.0
    params = [
        SamplingParams(temperature=0, min_tokens=2),
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5, VOCAB + 4)),
        SamplingParams(temperature=0, min_tokens=2, ignore_eos=True),
    ]
    sampler = new_sampler()
    batch = sampler.batch([sampler.open(one, []) for one in params], [0, 0, 0])

    steps = [sampler.sample(logits.clone(), batch).token_ids.tolist() for _ in range(3)]

    assert steps == [[5, 0, EOS], [5, 0, EOS], [EOS, EOS, EOS]]
    assert sampler.batch([sampler.open(params[0], [])], [2]).suppression is None


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    logits = random_logits(2)
    params = [SamplingParams(logprobs=2, temperature=0.3, frequency_penalty=1.0, min_tokens=3), SamplingParams(seed=1)]
    expected = torch.log_softmax(logits, -1)

    sampled = sample_once(logits, params, [0, 0])

    assert sampled.logprobs is not None
    torch.testing.assert_close(sampled.logprobs.sampled, expected.gather(1, sampled.token_ids[:, None])[:, 0])
    top = expected.topk(2)
    torch.testing.assert_close(sampled.logprobs.top, top.values)
    assert torch.equal(sampled.logprobs.top_token_ids, top.indices)


def test_zero_logprobs_report_the_sampled_token_only() -> None:
    sampled = sample_once(random_logits(1), [SamplingParams(logprobs=0)], [0])

    assert sampled.logprobs is not None
    assert sampled.logprobs.top.shape == (1, 0)


def test_what_no_row_asks_for_is_not_computed() -> None:
    sampler = new_sampler()
    greedy = sampler.batch([sampler.open(SamplingParams(temperature=0, top_p=0.5, top_k=3), [])] * 2, [0, 0])
    plain = sampler.batch([sampler.open(SamplingParams(), [])] * 2, [0, 0])
    short = sampler.batch([sampler.open(SamplingParams(top_k=5, top_p=0.9), [])], [0])

    assert (greedy.draws, greedy.penalties, greedy.suppression, greedy.num_logprobs) == (None,) * 4
    assert plain.draws is not None
    assert (plain.draws.is_greedy, plain.draws.log_min_p, plain.draws.truncation) == (None,) * 3
    assert short.draws is not None
    assert short.draws.truncation is not None
    assert short.draws.truncation.max_kept == 5


def test_an_empty_batch_samples_nothing() -> None:
    sampler = new_sampler()

    assert sampler.sample(torch.empty(0, VOCAB), sampler.batch([], [])).token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_bias_of_a_hundred_forces_a_token_and_minus_a_hundred_bans_it(temperature: float) -> None:
    logits = random_logits(3).index_fill(1, torch.tensor([4]), 6.0)
    params = [
        SamplingParams(temperature=temperature, seed=seed, logit_bias=bias)
        for seed, bias in enumerate([{7: 100.0}, {4: -100.0}, {}])
    ]

    drawn = [sample_once(logits, params, [position] * 3).token_ids.tolist() for position in range(40)]

    assert {row[0] for row in drawn} == {7}
    assert 4 not in {row[1] for row in drawn}
    assert 4 in {row[2] for row in drawn}


def test_a_bias_shifts_the_distribution_and_not_the_logprobs_that_are_told() -> None:
    logits, num_draws = random_logits(1), 20_000
    bias = {2: 1.5, 5: -2.0, 11: 0.25}
    shifted = logits[0].clone()
    for token_id, value in bias.items():
        shifted[token_id] += value
    expected = torch.softmax(shifted, -1) * num_draws

    params = [SamplingParams(seed=seed, logit_bias=bias, logprobs=VOCAB) for seed in range(num_draws)]
    sampled = sample_once(logits.expand(num_draws, -1), params, [0] * num_draws)

    found = torch.bincount(sampled.token_ids, minlength=VOCAB)
    assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE_BOUND
    assert sampled.logprobs is not None
    own = logits[0].log_softmax(-1)[sampled.token_ids]
    assert torch.allclose(sampled.logprobs.sampled, own, atol=1e-5)


def test_a_bias_is_added_after_the_penalties_and_an_early_end_does_not_come_by_it() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 1] = 4.0
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=4.0, logit_bias={1: 0.5, 2: 1.0}),
        SamplingParams(temperature=0.0, min_tokens=2, logit_bias={EOS: 100.0}),
    ]

    assert sample_once(logits, params, [0, 0]).token_ids.tolist() == [1, 1]
    assert sample_once(logits, params, [0, 2]).token_ids.tolist() == [1, EOS]
