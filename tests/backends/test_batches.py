"""Provider batches: one for a round, never two for one, a verdict for all, found again after a kill."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

import interlens
from interlens import APIParticipant, Conversation, RunReport, cli
from interlens.backends import lanes, provider_batch
from interlens.backends.batch_apis import Limits, now
from interlens.backends.batch_journal import Batch, Journal, pending
from interlens.backends.lanes import Patience
from interlens.backends.provider_batch import Pace
from interlens.errors import Stopped
from interlens.runner.scheduler import scheduler
from tests.peers.provider import Provider
from tests.peers.remote import spawned
from tests.runner.talk import rows

KINDS = ("openai", "anthropic")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setattr(lanes, "PATIENCE", Patience(first=0.02, longest=0.1, retries=4))
    monkeypatch.setattr(provider_batch, "PACE", Pace(first=0.02, longest=0.05))
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "key")
    with Provider() as peer:
        peer.auto_finish = 2
        yield peer
        interlens.unload()


def talk(url: str, turns: int = 3, n: int = 8, batch: Any = True, kind: str = "openai") -> Conversation:
    people = [
        APIParticipant(name, provider=kind, model_id="m-1", base_url=url, max_tokens=30, batch=batch)
        for name in ("ana", "ben")
    ]
    conv = Conversation(people, shared_context=lambda row: f"Speak about {row['topic']}.")
    return conv.turns(turns).set(data=rows(n))


def at(peer: Provider, kind: str) -> str:
    return str(getattr(peer, f"{kind}_url"))


def right(report: RunReport, n: int, turns: int) -> None:
    assert len(report) == n
    assert not report.failed, str(report[report.failed[0]].error)
    for i, result in enumerate(report.results.values()):
        contents = [m.content for m in result.transcript]
        assert len(contents) == turns + 1
        assert f"topic {i}." in contents[1]
        assert all(contents[k - 1] in contents[k] for k in range(1, turns + 1))


def made(peer: Provider) -> int:
    return peer.count("POST", "/v1/batches") + peer.count("POST", "/v1/messages/batches")


@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_for_a_round_of_all_jobs(peer: Provider, kind: str, tmp_path: Path) -> None:
    report = talk(at(peer, kind), 3, 20, kind=kind).rollout(out_dir=tmp_path, progress=False)
    right(report, 20, 3)
    assert [len(b.requests) for b in peer.batches] == [20, 20, 20]
    assert peer.count("POST", "/v1/chat") == 0
    assert peer.count("POST", "/v1/messages") == made(peer) * (kind == "anthropic")
    assert pending(tmp_path / "batches.jsonl") == []
    live = talk(at(peer, kind), 3, 20, batch=False, kind=kind).rollout(progress=False)
    assert [[m.content for m in t] for t in live.transcripts().values()] == [
        [m.content for m in t] for t in report.transcripts().values()
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ending", [{"reverse": True}, {"duplicated": [0, 3]}, {"output_id_empty_string": True}]
)
def test_results_in_any_shape(peer: Provider, kind: str, ending: dict[str, Any]) -> None:
    if kind == "anthropic" and "output_id_empty_string" in ending:
        pytest.skip("there are no files")
    with finishing(peer, lambda number: ending):
        right(talk(at(peer, kind), 2, 6, kind=kind).rollout(progress=False), 6, 2)
    assert made(peer) == 2


@contextmanager
def finishing(peer: Provider, ending: Callable[[int], dict[str, Any]]) -> Iterator[None]:
    """End each batch in a way of its own, as soon as it is there."""
    peer.auto_finish = None
    stop = threading.Event()

    def work() -> None:
        ended = 0
        while not stop.is_set():
            for batch in list(peer.batches)[ended:]:
                peer.finish(batch.id, **ending(ended))
                ended += 1
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_what_expired_or_is_missing_gets_one_more_chance(peer: Provider, kind: str) -> None:
    endings = [{"expired": [0, 1], "missing": [2]}, {"missing": [0]}]
    with finishing(peer, lambda number: endings[number] if number < 2 else {}):
        report = talk(at(peer, kind), 1, 6, kind=kind).rollout(progress=False)
    assert [len(b.requests) for b in peer.batches] == [6, 3]
    assert len(report.failed) == 1
    assert "was missing 2 times" in str(report[report.failed[0]].error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_request_is_its_own(peer: Provider, kind: str) -> None:
    with finishing(peer, lambda number: {"errored": {1: (400, "this one is bad")}}):
        report = talk(at(peer, kind), 1, 5, kind=kind).rollout(progress=False)
    assert report.failed == ["row_00001"]
    assert "this one is bad" in str(report["row_00001"].error)


def test_a_batch_that_ended_with_no_file_at_all(peer: Provider) -> None:
    with finishing(peer, lambda number: {"status": "cancelled", "no_files": True}):
        report = talk(at(peer, "openai"), 1, 3).rollout(progress=False)
    assert len(report.failed) == 3
    assert made(peer) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [{"after": True, "status": 500}, {"drop": True}, {"drop": "before"}])
def test_an_answer_that_was_lost_makes_no_second_batch(
    peer: Provider, kind: str, fault: dict[str, Any], tmp_path: Path
) -> None:
    peer.fault("message_batches.create" if kind == "anthropic" else "batches.create", **fault)
    report = talk(at(peer, kind), 2, 5, kind=kind).rollout(out_dir=tmp_path, progress=False)
    right(report, 5, 2)
    assert [len(b.requests) for b in peer.batches] == [5, 5]


def test_too_much_waits_already_is_no_attempt(peer: Provider) -> None:
    with finishing(
        peer, lambda number: {"status": "failed", "error_code": "token_limit_exceeded"} if not number else {}
    ):
        report = talk(at(peer, "openai"), 1, 8).rollout(progress=False)
    right(report, 8, 1)
    assert [len(b.requests) for b in peer.batches] == [8, 4, 4]


def test_batches_are_split_by_count_and_size(peer: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_batch, "FILL", 1.0)
    from interlens.backends.batch_apis import AnthropicBatches, OpenAIBatches

    monkeypatch.setattr(OpenAIBatches, "limits", Limits(requests=4, size=10_000_000))
    right(talk(at(peer, "openai"), 1, 10).rollout(progress=False), 10, 1)
    assert sorted(len(b.requests) for b in peer.batches) == [2, 4, 4]
    monkeypatch.setattr(AnthropicBatches, "limits", Limits(requests=1000, size=900))
    peer.reset()
    peer.auto_finish = 2
    right(talk(at(peer, "anthropic"), 1, 10, kind="anthropic").rollout(progress=False), 10, 1)
    assert len(peer.batches) > 2


def test_a_key_goes_to_nobody_else(peer: Provider) -> None:
    with Provider(host="127.0.0.2") as other:
        peer.results_url = other.url + "/v1/messages/batches/{id}/results"
        right(talk(at(peer, "anthropic"), 1, 3, kind="anthropic").rollout(progress=False), 3, 1)
        assert other.calls == []


def test_batches_need_one_process(peer: Provider) -> None:
    conv = talk(at(peer, "openai"), 1, 3)
    with pytest.raises(ValueError, match="waits for its batches in one process"):
        conv.rollout(devices=["cpu", "cpu"], progress=False)


def test_requests_that_are_alike_are_told_apart(peer: Provider) -> None:
    """Two runs without a folder, and a judge that is asked the same twice: nobody waits for ever."""
    judge = Conversation(
        [next(iter(talk(at(peer, "openai")).recipe.participants))], shared_context="Rate it."
    )

    def twice(conv: Conversation) -> list[str]:
        return [judge.branch().sample("ana", "well?").content for _ in range(2)]

    conv = talk(at(peer, "openai"), 1, 3).analyzer(twice)
    found: list[RunReport] = []
    threads = [threading.Thread(target=lambda: found.append(conv.rollout(progress=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    for report in found:
        right(report, 3, 1)
        assert all(len(a) == 2 and "well?" in a[0] for a in report.analyses().values())


def test_a_batch_that_is_never_made_ends_in_an_error(peer: Provider) -> None:
    peer.fault("batches.create", status=500, times=None)
    report = talk(at(peer, "openai"), 1, 2).rollout(progress=False)
    assert len(report.failed) == 2
    assert "no batch could be made in 5 tries" in str(report["row_00000"].error)
    assert list(peer.batches) == []


def test_anothers_batch_of_the_same_size_is_not_taken_for_ours(peer: Provider) -> None:
    """The provider has no place for a tag: whose a batch is, its results tell."""
    import anthropic

    client = anthropic.Anthropic(api_key="key", base_url=peer.anthropic_url, max_retries=0)
    params: Any = {"model": "m-1", "max_tokens": 9, "messages": [{"role": "user", "content": "theirs"}]}
    client.messages.batches.create(requests=[{"custom_id": f"other-{i}", "params": params} for i in range(3)])
    client.close()
    peer.fault("message_batches.create", status=500)  # ours is not made, and nobody says so
    right(talk(at(peer, "anthropic"), 1, 3, kind="anthropic").rollout(progress=False), 3, 1)
    assert [len(b.requests) for b in peer.batches] == [3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_few_may_go_live(peer: Provider, kind: str) -> None:
    """`batch="auto"`: what expired of a large batch is asked live, and costs as much."""
    prices = {"input": 1000.0, "output": 1000.0}
    people = [
        APIParticipant(
            "ana",
            provider=kind,
            model_id="m-1",
            base_url=at(peer, kind),
            max_tokens=30,
            batch="auto",
            prices=prices,
        )
    ]
    conv = Conversation(people, shared_context=lambda row: f"Speak about {row['topic']}.")
    conv = conv.turns(1).set(data=rows(60))
    with finishing(peer, lambda number: {"expired": [7]}):
        report = conv.rollout(progress=False)
    right(report, 60, 1)
    assert [len(b.requests) for b in peer.batches] == [60]
    live = [c for c in peer.calls if c.path.endswith(("chat/completions", "v1/messages"))]
    assert [c.body["messages"][-1]["content"] is not None for c in live] == [True]
    cost = [r.transcript[1].metadata["cost"] for r in report.results.values()]
    used = [r.transcript[1].metadata["usage"] for r in report.results.values()]
    per_token = [c / (u["input"] + u["output"]) for c, u in zip(cost, used, strict=True)]
    assert sorted(round(p * 1e4, 6) for p in per_token) == [5.0] * 59 + [10.0]


def test_batches_are_told_with_their_age(peer: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    peer.auto_finish = 40
    report = talk(at(peer, "openai"), 1, 3).rollout(progress=True)
    right(report, 3, 1)
    shown = capsys.readouterr().err
    assert "ana: 3 requests in 1 batches one after the other" in shown
    assert "what the rows of data hold comes on top" in shown
    backend = next(
        scheduler().pool.peek(spec) for spec in scheduler().pool.resident() if spec.kind == "openai"
    )
    assert backend is not None
    backend._running["x"] = Batch("x", {}, Journal(None), began=now() - 125)
    assert scheduler().pool.status() == "1 batch of openai:m-1 on the way, 2 min"
    del backend._running["x"]


def test_an_estimate_comes_before_anything_is_sent(peer: Provider) -> None:
    prices = {"input": 3.0, "output": 15.0}
    people = [
        APIParticipant(
            n,
            provider="openai",
            model_id="m-1",
            base_url=at(peer, "openai"),
            max_tokens=100,
            batch=True,
            prices=prices,
        )
        for n in ("ana", "ben")
    ]
    conv = Conversation(people, shared_context="x" * 400).turns(3)
    told: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "estimate":
            assert not peer.calls
            told.append(event)

    conv.rollout(10, progress=False, on_event=watch)
    assert [(e["name"], e["requests"], e["waves"]) for e in told] == [("ana", 20, 2), ("ben", 20, 2)]
    tokens_in = 10 * (100 + 300)  # 400 characters, then those and two replies
    assert told[0]["input_tokens"] == tokens_in
    assert told[0]["output_tokens"] == 2000
    assert told[0]["rows"] is False
    assert "comes on top" not in told[0]["text"]
    assert told[0]["cost"] == pytest.approx((tokens_in * 3 + 2000 * 15) / 2e6)
    used = [
        m.metadata["usage"] for t in conv.rollout(2, progress=False).transcripts().values() for m in t[1:]
    ]
    assert all(u["output"] <= 100 for u in used)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_batches_go_on_and_are_cancelled_when_asked(
    peer: Provider, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves them, and says which they are; `interlens cancel` ends them."""
    peer.auto_finish = None
    conv = talk(at(peer, kind), 1, 4, kind=kind)

    def interrupt() -> None:
        while not peer.batches:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interlens.runner.session.GRACE", 0.2)
        with pytest.raises(Stopped, match="batches on their way, which the same call waits for") as stopped:
            conv.rollout(out_dir=tmp_path, progress=False)
    thread.join()
    [batch] = pending(tmp_path / "batches.jsonl")
    assert batch in str(stopped.value)
    assert next(iter(peer.batches)).status not in ("cancelled", "canceling", "cancelling", "ended")
    interlens.unload()
    assert cli.main(["cancel", str(tmp_path)]) == 0
    assert f"{batch}: cancelled" in capsys.readouterr().out
    with finishing(peer, lambda number: {}):
        report = conv.rollout(out_dir=tmp_path, progress=False)
    right(report, 4, 1)
    assert cli.main(["cancel", str(tmp_path)]) == 0
    assert "no batch of" in capsys.readouterr().out


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from interlens.backends import lanes, provider_batch
from interlens.backends.lanes import Patience
from interlens.backends.provider_batch import Pace
lanes.PATIENCE = Patience(first=0.02, longest=0.1)
provider_batch.PACE = Pace(first=0.05, longest=0.1)
from tests.backends.test_batches import talk
report = talk({url!r}, 3, 6, kind={kind!r}).rollout(out_dir={out!r}, progress=False)
print(report)
"""


def kills(kind: str, seed: int, tmp_path: Path, times: int) -> None:
    """Kill the process again and again while batches are made, on their way, and collected."""
    rng = random.Random(seed)
    environment = os.environ | {"OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key"}
    with spawned() as remote:
        remote.set(auto_finish=3)
        url = remote.url + ("/v1" if kind == "openai" else "")
        program = PROGRAM.format(root=str(ROOT), url=url, kind=kind, out=str(tmp_path / "run"))
        for _ in range(times):
            child = subprocess.Popen(
                [sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL
            )
            before, end = len(remote.calls), time.monotonic() + 30
            target = before + rng.randrange(1, 8)
            while len(remote.calls) < target and child.poll() is None and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
            child.kill()
            child.wait()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert "RunReport(6 jobs: 6 done)" in done.stdout, done.stderr
        asked = [json.dumps(row["body"]["messages"]) for b in remote.batches for row in b.requests]
        assert len(asked) == 18, [len(b.requests) for b in remote.batches]
        assert len(set(asked)) == 18
        assert pending(tmp_path / "run" / "batches.jsonl") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_found_again(kind: str, tmp_path: Path) -> None:
    kills(kind, 0, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_thirty_times(kind: str, seed: int, tmp_path: Path) -> None:
    kills(kind, seed, tmp_path, 5)
