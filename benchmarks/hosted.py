"""Hosted models: how near calls come to the best schedule, what a slow call holds up, what kills cost.

`python benchmarks/hosted.py` measures all; names measure some: live, slow, money. The provider is the one of
`tests/peers`, in a process of its own. Medians go to standard output as JSON, and to a file with `--json`.
"""

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from interlens import APIParticipant, Conversation, RunReport, dataset_field
from interlens.backends.batch_journal import Journal
from tests.peers import remote
from tests.peers.remote import ROOT, Remote

for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
    os.environ.setdefault(variable, "dummy")

Place = tuple[int, int]
"""A call: the number of its conversation, and of its turn."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is asked, and how fast it is answered."""

    conversations: int
    turns: int
    latency: float
    width: int
    """How many calls may be on their way."""


def talk(url: str, people: int, load: Load, *, kind: str = "openai", batch: bool = False) -> Conversation:
    """One conversation a topic; all participants share a lane."""
    names = ("ana", "ben", "cleo")[:people]
    settings: dict[str, Any] = {"base_url": url, "max_tokens": 30, "max_concurrency": load.width}
    speakers = [
        APIParticipant(name, provider=kind, model_id="m-1", batch=batch, **settings) for name in names
    ]
    topics = [{"topic": str(i)} for i in range(load.conversations)]
    conv = Conversation(speakers, shared_context=("Speak about topic ", dataset_field("topic"), "."))
    return conv.turns(load.turns).set(data=topics)


# -- the best schedule


def schedule(chains: list[list[float]], slots: int) -> list[float]:
    """When each chain ends under greedy list scheduling: a free slot takes the first call of the list that
    can begin. The list has one turn after the other.
    """
    ready = [(0, chain) for chain in range(len(chains))]
    running: list[tuple[float, int, int]] = []
    ends, now = [0.0] * len(chains), 0.0
    while ready or running:
        while ready and len(running) < slots:
            turn, chain = heapq.heappop(ready)
            heapq.heappush(running, (now + chains[chain][turn], chain, turn))
        now = running[0][0]
        while running and running[0][0] == now:
            _, chain, turn = heapq.heappop(running)
            ends[chain] = now
            if turn + 1 < len(chains[chain]):
                heapq.heappush(ready, (turn + 1, chain))
    return ends


def hashed(load: Load, share: int) -> list[Place]:
    """The calls that are slow, one in `share`: those of the smallest hashes of topic and turn."""
    calls = [(chain, turn) for chain in range(load.conversations) for turn in range(load.turns)]
    calls.sort(key=lambda call: blake2b("topic {} turn {}".format(*call).encode()).digest())
    return sorted(calls[: max(1, len(calls) // share)])


# -- live calls


def ready(peer: Remote, load: Load) -> float:
    """Seconds of a first rollout, of one call without latency: the SDK is imported and the client made."""
    peer.reset()
    began = time.perf_counter()
    talk(peer.openai_url, 1, load).turns(1).rollout(1, progress=False)
    return time.perf_counter() - began


def rolled(
    peer: Remote, load: Load, people: int, slow: Collection[Place] = (), more: float = 0.0
) -> tuple[float, list[float], int]:
    """Seconds of a rollout, seconds until each conversation was there, and the most calls at a time."""
    peer.reset()
    peer.set(latency=load.latency)
    for chain in {chain for chain, _ in slow}:
        before = -1
        for turn in sorted(turn for other, turn in slow if other == chain):
            peer.fault("chat", when=f"topic {chain}.", times=turn - before - 1)
            peer.fault("chat", when=f"topic {chain}.", times=1, hang=more)
            before = turn
    conv, ends = talk(peer.openai_url, people, load), [0.0] * load.conversations

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "job":
            ends[int(event["id"].rpartition("_")[2])] = time.perf_counter() - began

    began = time.perf_counter()
    report = conv.rollout(load.conversations, progress=False, on_event=watch)
    wall = time.perf_counter() - began
    assert not report.failed, report[report.failed[0]].error
    assert peer.count("POST", "/v1/chat") == load.conversations * load.turns
    return wall, ends, peer.most_in_flight


def live(peer: Remote, load: Load, people: int, rounds: int) -> dict[str, float]:
    """The bound over the wall time, where all calls take equally long."""
    first = ready(peer, load)
    found = [rolled(peer, load, people) for _ in range(rounds)]
    wall = statistics.median(seconds for seconds, _, _ in found)
    bound = max(schedule([[load.latency] * load.turns] * load.conversations, load.width))
    return {
        "participants": people,
        "calls": load.conversations * load.turns,
        "first rollout, one call without latency, s": first,
        "bound, s": bound,
        "wall, s": wall,
        "bound / wall": bound / wall,
        "times one after the other": load.conversations * load.turns * load.latency / wall,
        "most in flight": max(most for _, _, most in found),
    }


def slow(peer: Remote, load: Load, latency: float, share: int, rounds: int) -> dict[str, float]:
    """The wall time over the bound, where a few calls take longer, and who else is late."""
    calls = hashed(load, share)
    times = range(load.turns)
    chains = [
        [latency if (i, turn) in calls else load.latency for turn in times] for i in range(load.conversations)
    ]
    bounds = schedule(chains, load.width)
    ready(peer, load)
    found = [rolled(peer, load, 2, calls, latency - load.latency) for _ in range(rounds)]
    wall = statistics.median(seconds for seconds, _, _ in found)
    others = set(range(load.conversations)) - {chain for chain, _ in calls}
    pairs = [(ends[i], bounds[i]) for _, ends, _ in found for i in others]
    return {
        "calls": load.conversations * load.turns,
        "slow calls": len(calls),
        "bound, s": max(bounds),
        "wall, s": wall,
        "wall / bound": wall / max(bounds),
        "times one after the other": sum(map(sum, chains)) / wall,
        "others": len(others),
        "others' last end / bound": max(end for end, _ in pairs) / max(bound for _, bound in pairs),
        "others' end / bound, median": statistics.median(end / bound for end, bound in pairs),
        "most in flight": max(most for _, _, most in found),
    }


# -- batches and kills


CLIENT = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.hosted import Load, talk
from interlens.backends import provider_batch
provider_batch.PACE = provider_batch.Pace(first=0.05, longest=0.1)
talk({url!r}, 2, {load!r}, kind={kind!r}, batch=True).rollout(out_dir={out!r}, progress=False)
"""
PATIENCE = 60.0
"""Seconds that a client may take."""


def money(peer: Remote, kills: int, seed: int) -> dict[str, float]:
    """Kill clients that wait for batches, again and again, and count what was asked twice."""
    rng, began = random.Random(seed), time.perf_counter()
    found: Counter[str] = Counter()
    while found["kills"] < kills:
        for kind in ("openai", "anthropic"):
            if found["kills"] < kills:
                found += _killed_run(peer, kind, kills - found["kills"], rng)
    runs = ["runs", "kills", "kills while a batch was made", "batches", "batches made twice"]
    calls = ["requests", "requests asked twice", "replies", "replies in a wrong place"]
    return {name: found[name] for name in runs + calls} | {"seconds": time.perf_counter() - began}


def _killed_run(peer: Remote, kind: str, kills: int, rng: random.Random) -> Counter[str]:
    """One run, killed until it is done or there were so many kills; then it goes on to its end."""
    peer.reset()
    peer.set(auto_finish=3)
    for route in ("batches.create", "message_batches.create"):
        peer.fault(route, hang=0.1, times=None)
    load, url = Load(conversations=6, turns=4, latency=0.0, width=64), getattr(peer, f"{kind}_url")
    found = Counter(runs=1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        program = CLIENT.format(root=str(ROOT), url=url, load=load, kind=kind, out=str(out))
        while _client(peer, program, Path(folder) / "errors", rng if found["kills"] < kills else None):
            open_ones = Journal(out / "batches.jsonl").open_batches().values()
            found += Counter(kills=1)
            found["kills while a batch was made"] += any("batch" not in event for event in open_ones)
        report = RunReport.load(out)
        said = {job: [m.content for m in t] for job, t in report.transcripts().items()}
    batches = [sorted(json.dumps(row["body"]["messages"]) for row in b.requests) for b in peer.batches]
    asked = [request for batch in batches for request in batch]
    found |= Counter(batches=len(batches), requests=len(asked), replies=load.conversations * load.turns)
    found["batches made twice"] = len(batches) - len({tuple(batch) for batch in batches})
    found["requests asked twice"] = len(asked) - len(set(asked))
    found["replies in a wrong place"] = found["replies"] - _right(said, talk(url, 2, load, kind=kind), load)
    return found


def _client(peer: Remote, program: str, errors: Path, rng: random.Random | None) -> bool:
    """Let a client work, to its end or until a random moment; whether it was killed."""
    with errors.open("ab") as told:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=told
        )
        try:
            if rng is None:
                child.wait(PATIENCE)
            else:
                target, end = len(peer.calls) + rng.randrange(1, 8), time.monotonic() + PATIENCE
                pause = rng.random() * rng.choice((0.005, 0.05))
                while len(peer.calls) < target and child.poll() is None and time.monotonic() < end:
                    time.sleep(0.002)
                time.sleep(pause)
        finally:
            child.kill()
            child.wait()
    if child.returncode > 0:
        raise RuntimeError(f"a client failed: {errors.read_text()[-2000:]}")
    return child.returncode < 0


def _right(said: dict[str, list[str]], conv: Conversation, load: Load) -> int:
    """How many replies are what live calls without kills get in the same place."""
    transcripts = conv.rollout(load.conversations, progress=False).transcripts()
    right = 0
    for i, (job, transcript) in enumerate(transcripts.items()):
        wanted, got = [m.content for m in transcript], said.get(job, [])
        assert all(f"topic {i}." in text for text in wanted)
        right += sum(a == b for a, b in zip(wanted[1:], got[1:], strict=False))
    return right


def main() -> int:
    measures: dict[str, Callable[[Any, Remote, Load], Any]] = {
        "live": lambda a, peer, load: [live(peer, load, people, a.rounds) for people in (1, 2)],
        "slow": lambda a, peer, load: slow(peer, load, a.slow_latency, a.slow_share, a.rounds),
        "money": lambda a, peer, load: money(peer, a.kills, a.seed),
    }
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    top.add_argument("which", nargs="*", choices=[*measures, []], help="what to measure (default: all)")
    top.add_argument("--conversations", type=int, default=256)
    top.add_argument("--turns", type=int, default=4)
    top.add_argument("--latency", type=float, default=1.0, help="seconds of a call")
    top.add_argument("--concurrency", type=int, default=64)
    top.add_argument("--slow-latency", type=float, default=10.0, help="seconds of a slow call")
    top.add_argument("--slow-share", type=int, default=100, help="one call in so many is slow")
    top.add_argument("--kills", type=int, default=30)
    top.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--json", type=Path)
    asked = top.parse_args()
    size = {"conversations": asked.conversations, "turns": asked.turns}
    load = Load(latency=asked.latency, width=asked.concurrency, **size)
    out = {}
    with remote.spawned() as peer:
        for name in asked.which or measures:
            out[name] = measures[name](asked, peer, load)
            print(json.dumps({name: out[name]}), flush=True)
        assert not peer.broken, peer.broken
    if asked.json is not None:
        asked.json.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
