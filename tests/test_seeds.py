import hashlib
import itertools
import random
import struct

import numpy as np
import pytest

from interlens import ScriptedParticipant
from interlens.seeds import Stream, uniform
from tests.runner.talk import about, sent, talk, words

N = 20_000


def reference(stream: Stream, counter: int) -> float:
    """The formula of the module's docstring, written down once more."""
    words = (stream.job, stream.sample, stream.own, stream.reseeds, stream.position, stream.turn)
    key = hashlib.blake2b(repr((*words, stream.purpose, stream.draw)).encode(), digest_size=16).digest()
    digest = hashlib.blake2b(struct.pack("<q", counter), key=key, digest_size=8).digest()
    return (struct.unpack("<Q", digest)[0] // 2**11) / 2**53


def test_the_formula() -> None:
    rng = random.Random(1)
    for _ in range(200):
        stream = Stream(
            job=rng.randrange(-5, 2**40),
            own=rng.choice([None, 0, 7]),
            sample=rng.randrange(3),
            reseeds=tuple(rng.randrange(9) for _ in range(rng.randrange(3))),
            position=rng.randrange(3),
            turn=rng.randrange(9),
            purpose=rng.choice(["turn", "sample", "turn/tool/1"]),
            draw=rng.randrange(3),
        )
        counter = rng.randrange(10_000)
        assert uniform(stream.key(), counter) == reference(stream, counter)


def test_uniform_is_uniform() -> None:
    u = np.array([uniform(Stream(job=3).key(), i) for i in range(N)])
    assert u.min() >= 0
    assert u.max() < 1
    assert len(set(u)) == N
    # Moments 1 to 4 are 1/2, 1/3, 1/4, 1/5, with variance 1/(2k+1) - 1/(k+1)^2 over N.
    for k in (1, 2, 3, 4):
        error = (1 / (2 * k + 1) - 1 / (k + 1) ** 2) ** 0.5 / N**0.5
        assert abs((u**k).mean() - 1 / (k + 1)) < 4 * error
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = ((counts - N / 64) ** 2 / (N / 64)).sum()
    assert abs(chi2 - 63) < 4.5 * (2 * 63) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_positions_of_one_stream_are_independent(lag: int) -> None:
    u = np.array([uniform(Stream().key(), i) for i in range(N)])
    assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / N**0.5


def test_neighbouring_streams_are_independent() -> None:
    """Job seeds that follow each other, which is what a rollout has, at the same token position."""
    u = np.array([[uniform(Stream(job=job).key(), i) for i in range(4)] for job in range(N // 4)])
    off = np.corrcoef(u.T) - np.eye(4)
    assert abs(off).max() < 4.5 / len(u) ** 0.5
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 4 / len(u) ** 0.5


def test_every_field_matters_and_none_stands_for_another() -> None:
    changes = {
        "job": 1, "own": 1, "sample": 1, "reseeds": (1,), "position": 1, "turn": 1, "purpose": "1", "draw": 1
    }  # fmt: skip
    assert set(changes) == set(Stream.__dataclass_fields__)
    streams = [Stream()]
    for n in (1, 2):
        for names in itertools.combinations(changes, n):
            streams.append(Stream(**{name: changes[name] for name in names}))
    streams += [Stream(reseeds=r) for r in ((0,), (1, 1), (11,))] + [Stream(own=0), Stream(job=-1)]
    keys = [s.key() for s in streams]
    assert len(set(keys)) == len(keys)


def test_a_number_of_numpys_names_the_same_stream() -> None:
    whole = np.int64
    assert Stream(job=whole(5), own=whole(2), turn=whole(1)).key() == Stream(job=5, own=2, turn=1).key()
    assert Stream(reseeds=(whole(3),), draw=True).key() == Stream(reseeds=(3,), draw=1).key()
    with pytest.raises(TypeError):
        Stream(job=1.5).key()  # type: ignore[arg-type]


def test_arms_with_other_names_draw_the_same_numbers() -> None:
    """Names and job ids are not in the formula: paired arms differ by what was changed alone."""
    one = talk()
    two = about(one.set(participants=[ScriptedParticipant(name, words) for name in ("eve", "dan")]), 4)
    one.rollout(4, seed=3, progress=False)
    two.rollout(seed=3, progress=False)
    drawn = [{r.stream.key() for p in c.recipe.participants for r in p.backend.requests} for c in (one, two)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4 * 4
    assert {job for job, _ in sent(one)} == {3, 4, 5, 6}
