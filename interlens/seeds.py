"""Chance has one source: a stream named by what it is for, and one uniform number per token position.

u(position) = blake2b(job seed, sample, participant seed, reseeds, speaker's position, turn, purpose, draw |
token position). Names, job ids, devices, batch mates and the global generators are not in it: arms with other
names are paired, and a row draws the same numbers wherever and whenever it runs. blake2b is used as the
counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 2: a keyed
hash of a counter).
"""

import hashlib
import struct
from dataclasses import dataclass, replace
from operator import index


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Everything that a random number may depend on."""

    job: int = 0
    """The job's seed: the run's seed plus the job's number."""
    own: int | None = None
    """The participant's own `seed=`, mixed in; `None` mixes in nothing."""
    sample: int = 0
    """Which of `samples=k` conversations of one row."""
    reseeds: tuple[int, ...] = ()
    """What `branch(reseed=)` added, oldest first."""
    position: int = 0
    """The speaker's place in the list of participants."""
    turn: int = 0
    """The ordinal of the speaking turn."""
    purpose: str = "turn"
    """What is drawn for: `turn`, `sample`, `turn/tool/1`, …"""
    draw: int = 0
    """Which draw for that purpose: denied attempts and successive `sample` calls count up."""

    def key(self) -> bytes:
        """The stream's 16-byte key."""
        own = None if self.own is None else _whole(self.own)
        reseeds = tuple(map(_whole, self.reseeds))
        job, sample, position, turn, draw = map(
            _whole, (self.job, self.sample, self.position, self.turn, self.draw)
        )
        words = repr((job, sample, own, reseeds, position, turn, self.purpose, draw))
        return hashlib.blake2b(words.encode(), digest_size=16).digest()

    def at(self, **changes: object) -> "Stream":
        """The same stream with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _whole(n: int) -> int:
    """A plain int, so that a number of numpy's names the same stream; what is not whole is refused."""
    return int(index(n))


def uniform(key: bytes, counter: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of the key and the token's position alone."""
    digest = hashlib.blake2b(struct.pack("<q", counter), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
