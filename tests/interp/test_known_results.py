"""Results that are known, on SmolLM2 through the public interface alone.

Sources: induction heads (Olsson et al. 2022), activation patching (Meng et al. 2022), the logit lens
(nostalgebraist 2020), a linear sentiment direction (Tigges et al. 2023), persona vectors (Chen et al. 2025),
and one of our own: a push on one participant reaches the other.
"""

import itertools
import random
import statistics

import pytest
import torch
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from interlens import (
    Ablate,
    AutoModelParticipant,
    Capture,
    Conversation,
    Direction,
    Probe,
    Span,
    Steer,
    attention,
    attribution,
    logit_lens,
    patch_grid,
)
from interlens.crossing import contagion
from interlens.interp.reading import token_id

pytestmark = pytest.mark.slow
ONE, TWO = "alice", "bob"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return AutoModelParticipant.from_pretrained("smollm2", name=ONE, device="cpu")


# -- 1. induction heads

N = 50


@pytest.fixture(scope="module")
def repeated():
    """Random tokens, twice."""
    ids = random.Random(0).sample(range(1000, 40000), N)
    return (*ids, *ids)


def nll(run):
    """Mean negative log-probability of the first copy and of the second."""
    return -statistics.mean(run.logprobs[: N - 1]), -statistics.mean(run.logprobs[N:])


def heads_off(heads):
    by_layer = {}
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    return [Ablate(layers=layer, site="z", heads=tuple(h)) for layer, h in by_layer.items()]


def test_induction_heads(model, repeated):
    first, second = nll(model.forward(repeated))
    assert second < 0.5 * first
    patterns = attention(model, repeated)
    layers, heads = patterns.shape[:2]
    queries = torch.arange(N, 2 * N - 1)
    scores = patterns[:, :, queries, queries - N + 1].mean(-1)
    assert scores.max() >= 0.6
    order = [divmod(i, heads) for i in scores.flatten().argsort(descending=True).tolist()]
    top = order[:8]
    chance = random.Random(1).sample(order[8:], 8)
    _, without = nll(model.forward(repeated, edits=heads_off(top)))
    _, control = nll(model.forward(repeated, edits=heads_off(chance)))
    assert without - second > 3 * (control - second)
    assert layers == 30


# -- 2. a fact is localised by patching

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Spain": "Madrid",
    "Egypt": "Cairo",
}


def asks(country):
    return f"The capital of {country} is the city of"


def test_patching_localises_the_fact(model):
    ids = {c: model.tokenizer(asks(c))["input_ids"] for c in CAPITALS}
    size = len(ids["France"])
    known = [c for c in CAPITALS if len(ids[c]) == size]
    subject = next(i for i, (a, b) in enumerate(zip(ids["France"], ids["Germany"], strict=True)) if a != b)
    pairs = list(itertools.pairwise(known))[:4]
    assert len(pairs) >= 3
    grids = []
    for clean, corrupt in pairs:
        good, bad = (token_id(f" {CAPITALS[c]}", model.tokenizer) for c in (clean, corrupt))
        grids.append(
            patch_grid(
                model,
                ids[clean],
                ids[corrupt],
                lambda logits, good=good, bad=bad: float(logits[good] - logits[bad]),
                layers=(0, 12, 15, 18, 24, 27),
                positions=(subject, size - 1),
            )
        )
    mean = sum(grids) / len(grids)
    at_subject, at_end = mean[subject], mean[size - 1]
    assert (at_subject[[0, 12, 15]] >= 0.9).all(), mean
    assert at_subject[24] <= 0.1, mean
    assert (at_end[[0, 12, 15, 18]] <= 0.1).all(), mean
    assert at_end[27] >= 0.6, mean


# -- 3. the logit lens, and attribution that sums


def test_the_logit_lens_and_attribution(model):
    rank = logit_lens(model, asks("France")).rank(" Paris")
    assert all(r > 1000 for r in rank[13:20]), rank
    assert rank[27:] == [0, 0, 0], rank
    found = attribution(model, asks("France"), " Paris", against=" London")
    last = model.forward(asks("France"), logits="last").logits[0]
    true = last[token_id(" Paris", model.tokenizer)] - last[token_id(" London", model.tokenizer)]
    assert sum(found.parts.values()) == pytest.approx(float(true), abs=1e-3)
    assert found.total == pytest.approx(float(true), abs=1e-3)


# -- 4. sentiment is linear, and steers

GOOD = tuple(
    "wonderful great amazing excellent lovely superb fantastic delightful brilliant charming".split()  # noqa: SIM905
)
BAD = tuple("terrible awful horrible dreadful poor nasty disgusting boring miserable ugly".split())  # noqa: SIM905
NOUNS = ("film", "book", "hotel", "meal", "song", "game", "trip", "play", "phone", "car")
LEVEL = 15


def sentences(words, nouns):
    return [f"The {noun} was {word}." for noun in nouns for word in words]


def ends(model, texts):
    found = model.forward(texts, capture=Capture("resid_post", layers=LEVEL, span=[-1]), logits="last")
    return torch.cat([f.activations.at() for f in found])


def log_odds(model, prompt, edits=None):
    logits = model.forward(prompt, edits=edits, logits="last").logits[0]
    logp = torch.log_softmax(logits, -1)
    sides = [
        torch.stack([logp[model.tokenizer(f" {w}")["input_ids"][0]] for w in side]) for side in (GOOD, BAD)
    ]
    return float(sides[0].logsumexp(0) - sides[1].logsumexp(0))


@pytest.fixture(scope="module")
def sentiment(model):
    """Activations of one half of adjectives and nouns, and of the other."""
    halves = (slice(0, 6), slice(0, 6)), (slice(6, None), slice(6, None))
    out = []
    for words, nouns in halves:
        a, b = (ends(model, sentences(side[words], NOUNS[nouns])) for side in (GOOD, BAD))
        out.append((a, b))
    return out


def test_sentiment_is_linear(sentiment):
    (a, b), (c, d) = sentiment
    train, labels = torch.cat([a, b]), [1] * len(a) + [0] * len(b)
    test, truth = torch.cat([c, d]), [1] * len(c) + [0] * len(d)
    assert Probe.fit(train, labels, layer=LEVEL).score(test, truth) >= 0.95
    shuffled = [
        Probe.fit(train, random.Random(s).sample(labels, len(labels))).score(test, truth) for s in range(9)
    ]
    assert 0.3 <= statistics.mean(shuffled) <= 0.7
    gap = Direction.from_contrast(a, b, layer=LEVEL)
    middle = gap.project((a.mean(0) + b.mean(0)) / 2)
    assert ((gap.project(c) > middle).float().mean() + (gap.project(d) < middle).float().mean()) / 2 >= 0.95


def test_its_direction_steers_and_random_ones_do_not(model, sentiment):
    (a, b), _ = sentiment
    gap = Direction.from_contrast(a, b, layer=LEVEL)
    prompts = [f"I thought the {noun} was" for noun in NOUNS[6:]]

    def shift(direction, coef):
        push = Steer(direction, coef=coef, span=Span())
        return statistics.mean(log_odds(model, p, push) - log_odds(model, p) for p in prompts)

    assert shift(gap, 1.0) >= 2.5
    assert shift(gap, -1.0) <= -2.5
    assert abs(statistics.mean(shift(gap.random_like(s), 1.0) for s in range(5))) <= 1


# -- 5. the persona-vector pipeline, and 6. whether it crosses

CHEERFUL = "You are a cheerful, joyful and enthusiastic assistant. Everything delights you."
GLOOMY = "You are a gloomy, miserable and hopeless assistant. Everything saddens you."
QUESTIONS = (
    "How was your day?",
    "What do you think of the weather?",
    "Tell me about your favourite book.",
    "What is it like to live in a city?",
    "How do you feel about Mondays?",
    "Describe a walk in the park.",
    "What do you think about the future?",
    "How is your work going?",
)
OTHERS = (
    "What did you have for breakfast?",
    "Tell me about your weekend.",
    "What do you think of music?",
    "How do you like your neighbours?",
)
TRAIT = 12
judge = SentimentIntensityAnalyzer()


def mood(text):
    return judge.polarity_scores(text)["compound"]


def rollouts(system, questions, *, samples, hooks=(), seed=0):
    speaker = AutoModelParticipant.from_pretrained(
        "smollm2", name=ONE, device="cpu", system_prompt=system, max_new_tokens=40, temperature=0.8
    )
    conv = Conversation(speaker, shared_context=None).hook(*hooks) if hooks else Conversation(speaker)
    replies = []
    for i, question in enumerate(questions):
        fresh = conv.branch(reseed=seed + i)
        replies += fresh.sample(ONE, question, n=samples)
    return replies


@pytest.fixture(scope="module")
def persona():
    """Mean activations of replies under two system prompts, and the words."""
    words = Capture("resid_post", layers=TRAIT, span=Span(phase="generated", part="content"), reduce="mean")
    sides = [rollouts(system, QUESTIONS, samples=3, hooks=[words]) for system in (CHEERFUL, GLOOMY)]
    moods = [[mood(m.content) for m in side] for side in sides]
    acts = [torch.cat([m.activations.at() for m in side]) for side in sides]
    return acts, moods


@pytest.fixture(scope="module")
def trait(persona):
    """The difference of means over the pairs that the judge keeps."""
    (a, b), (high, low) = persona
    keep = [i for i, (x, y) in enumerate(zip(high, low, strict=True)) if x > 0.5 and y < 0.5]
    assert len(keep) >= 5
    return Direction.from_contrast(a[keep], b[keep], layer=TRAIT)


def test_the_persona_vector_pipeline(model, persona, trait):
    _, (high, low) = persona
    assert statistics.mean(high) - statistics.mean(low) >= 0.4
    neutral = "You are a person who chats."

    def score(direction, coef):
        replies = rollouts(neutral, OTHERS, samples=4, hooks=[Steer(direction, coef=coef)], seed=9)
        return statistics.mean(mood(m.content) for m in replies)

    own = [score(trait, c) for c in (-3, 3)]
    control = [score(trait.random_like(0), c) for c in (-3, 3)]
    assert own[1] - own[0] >= 0.4, (own, control)
    assert abs(control[1] - control[0]) <= 0.25, (own, control)


def test_a_push_on_one_participant_reaches_the_other(trait):
    people = [
        AutoModelParticipant.from_pretrained(
            "smollm2",
            name=n,
            device="cpu",
            max_new_tokens=32,
            temperature=0.8,
            system_prompt="You are a person who chats.",
        )
        for n in (ONE, TWO)
    ]
    conv = Conversation(people, shared_context="You meet a friend. Talk about your day.")
    found = contagion(conv, trait, speaker=ONE, coefs=(-3.0,), turns=2, n=40, scores={"mood": mood})
    effect = found.effect(author=TWO).set_index("arm")
    pushed, control = effect.loc["-3"], effect.loc["random -3"]
    assert pushed["n"] == control["n"] == 40
    assert pushed["projection"] < -2 * pushed["projection_sem"], effect
    assert pushed["projection"] < control["projection"] - control["projection_sem"], effect
