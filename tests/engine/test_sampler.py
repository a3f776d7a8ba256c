"""The sampler against the same rule written out in plain Python, and against transformers' own warpers."""

import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from interlens.engine.sampler import Draw, raw_statistics, sample
from interlens.request import SamplingParams
from interlens.seeds import Stream, uniform

INF = math.inf
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.15},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.05, "temperature": 0.8},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"logit_bias": {0: 3.0, 5: -INF, 7: -2.0}},
    {"logit_bias": {2: -INF, 3: 5.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.8},
]


def slowly(logits: list[float], draw: Draw) -> list[float]:
    """The distribution that a row is drawn from, step by step."""
    p = draw.params
    x = [v + (p.logit_bias or {}).get(i, 0.0) for i, v in enumerate(logits)]
    for i in {*draw.prompt, *draw.reply}:
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(draw.reply):
        x[i] -= p.presence_penalty + p.frequency_penalty * list(draw.reply).count(i)
    if p.temperature == 0:
        return [float(i == x.index(max(x))) for i in range(len(x))]
    weights = [math.exp((v - max(x)) / p.temperature) for v in x]
    order = sorted(range(len(x)), key=lambda i: -weights[i])
    kept = order[: p.top_k] if p.top_k else order
    total, so_far, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if so_far < p.top_p * total:
            nucleus.append(i)
        so_far += weights[i]
    final = {i for i in nucleus if weights[i] >= p.min_p * weights[order[0]]}
    whole = sum(weights[i] for i in final)
    return [weights[i] / whole if i in final else 0.0 for i in range(len(x))]


def assert_drawn_from(distribution: list[float], u: float, token: int | None) -> None:
    """The token is the one whose interval holds u, up to the rounding of single precision."""
    assert token is not None
    assert distribution[token] > 0
    below = sum(distribution[:token])
    assert below - 1e-5 <= u <= below + distribution[token] + 1e-5


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_the_rule_written_out(settings):
    chance = random.Random(str(settings))
    rows, draws = [], []
    for _ in range(60):
        rows.append([chance.gauss(0, 3) for _ in range(23)])
        prompt = [chance.randrange(23) for _ in range(4)]
        reply = [chance.randrange(23) for _ in range(chance.randrange(5))]
        draws.append(Draw(SamplingParams(**settings), chance.random(), prompt, reply))
    for logits, draw, token in zip(rows, draws, sample(torch.tensor(rows), draws), strict=True):
        assert_drawn_from(slowly(logits, draw), draw.uniform, token)


def test_rows_of_a_batch_are_drawn_as_alone():
    chance = random.Random(3)
    rows = torch.tensor([[chance.gauss(0, 2) for _ in range(301)] for _ in SETTINGS])
    draws = [Draw(SamplingParams(**s), chance.random(), [1, 2], [3, 3]) for s in SETTINGS]
    given = rows.clone()
    alone = [sample(rows[i : i + 1], [draws[i]])[0] for i in range(len(draws))]
    assert sample(rows, draws) == alone
    assert torch.equal(rows, given), "the logits that were handed in are not changed"


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 9, "top_p": 0.6}, [TopKLogitsWarper(9), TopPLogitsWarper(0.6)]),
        ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_the_distribution_is_that_of_transformers(settings, warpers):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(8)) * 2
    seen = torch.tensor([[3, 4, 5, 3]])
    theirs = logits.clone()
    for warper in warpers:
        theirs = warper(seen, theirs)
    theirs = torch.softmax(theirs, -1)[0]
    n = 8000
    draws = [Draw(SamplingParams(**settings), (i + 0.5) / n, [3, 4], [5, 3]) for i in range(n)]
    ours = torch.bincount(torch.tensor(sample(logits.expand(n, -1), draws)), minlength=40) / n
    # an evenly spaced u misses each interval by less than one step
    assert (ours - theirs).abs().max() < 2 / n + 1e-6


def test_the_largest_of_equals_is_the_first():
    rows = torch.tensor([[1.0, 5.0, 5.0, 5.0]])
    for settings in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-12}):
        assert sample(rows, [Draw(SamplingParams(**settings), 0.999, (), ())]) == [1]
    assert sample(rows, [Draw(SamplingParams(min_p=1.0), 0.999, (), ())]) == [3]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 3000),
        ({"top_k": 7}, 7),
        ({"top_p": 0.5}, 1500),
        ({"top_k": 2000, "top_p": 0.75}, 1500),
        ({"min_p": 1.0}, 3000),
    ],
    ids=str,
)
def test_of_many_equal_tokens_the_first_are_kept_and_drawn_evenly(settings, kept):
    """More tokens than are summed or put in order at a time."""
    rows = torch.zeros(1, 3000)
    draws = [(i + 0.5) / 97 for i in range(97)]
    for u in draws:
        [token] = sample(rows, [Draw(SamplingParams(**settings), u, (), ())])
        assert abs(token - u * kept) <= 1


def test_a_wide_vocabulary_follows_the_rule_too():
    chance = random.Random(11)
    for settings in ({"top_p": 0.97}, {"min_p": 0.02}, {"top_k": 1800, "top_p": 0.99}, {"temperature": 3.0}):
        logits = [chance.gauss(0, 1.5) for _ in range(2500)]
        draws = [Draw(SamplingParams(**settings), chance.random(), (), ()) for _ in range(20)]
        distribution = slowly(logits, draws[0])
        for draw, token in zip(draws, sample(torch.tensor([logits] * 20), draws), strict=True):
            assert_drawn_from(distribution, draw.uniform, token)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-3])
def test_a_tiny_temperature_takes_the_largest(temperature):
    rows = torch.tensor([[3.0, 80.0, 79.9, -1e4], [0.0, -INF, -5.0, -INF]])
    draws = [Draw(SamplingParams(temperature=temperature), u, (), ()) for u in (0.999999, 0.999999)]
    assert sample(rows, draws) == [1, 0]


def test_a_huge_temperature_draws_evenly_among_what_is_allowed():
    rows = torch.tensor([[3.0, -INF, 79.9, -1e4]])
    drawn = [sample(rows, [Draw(SamplingParams(temperature=1e300), u, (), ())])[0] for u in (0.0, 0.4, 0.9)]
    assert drawn == [0, 2, 3]


def test_a_token_without_probability_is_never_drawn():
    """The ends of [0, 1) fall on tokens that may be drawn, whatever total the rounding left."""
    almost = 1 - 2.0**-53
    chance = torch.Generator().manual_seed(0)
    for n in (3, 50, 1001):
        rows = torch.randn(40, n, generator=chance)
        bias = {0: -INF, 1: -INF, n - 1: -INF} if n > 3 else {0: -INF, 2: -INF}
        for settings in ({}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 5.0}):
            params = SamplingParams(logit_bias=bias, **settings)
            for u in (0.0, almost):
                for token in sample(rows, [Draw(params, u, (), ())] * 40):
                    assert token not in bias


def test_all_but_one_banned_leaves_that_one_and_all_banned_leaves_none():
    rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    ban = {i: -INF for i in range(6)}
    last = {i: b for i, b in ban.items() if i != 4}
    for settings in ({"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 2, "min_p": 0.5}):
        draws = [Draw(SamplingParams(logit_bias=b, **settings), 0.7, (), ()) for b in (last, ban)]
        assert sample(rows, draws) == [4, None]


def test_many_draws_have_the_frequencies_of_the_distribution():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.2, 0.7])
    n, key = 20_000, Stream(job=12).key()
    draws = [Draw(SamplingParams(temperature=1.2), uniform(key, i), (), ()) for i in range(n)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(n, -1), draws)), minlength=7)
    expected = torch.softmax(logits / 1.2, -1) * n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 30  # six degrees of freedom: exceeded once in 25 000 such samples


def test_raw_statistics_are_those_of_the_distribution_before_any_setting():
    rows = [[0.5, -2.0, 3.0, 0.0], [-INF, 1.0, 1.0, -INF], [0.0, -200.0, -INF, -INF]]
    logp, entropy = raw_statistics(torch.tensor(rows), [2, 1, 1])
    for row, token, got, spread in zip(rows, (2, 1, 1), logp, entropy, strict=True):
        total = sum(math.exp(v) for v in row)
        p = [math.exp(v) / total for v in row]
        assert got == pytest.approx(row[token] - math.log(total), abs=1e-5)
        assert spread == pytest.approx(-sum(q * math.log(q) for q in p if q > 0), abs=1e-5)
    assert all(math.isfinite(v) for v in (*logp, *entropy))
