"""Several processes, whatever they die of: nothing lost, nothing done twice, one bad row harms nobody.

`devices=["cpu", "cpu"]` is a real pool.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

import interlens
from interlens import Conversation, FunctionParticipant, RunReport, ScriptedParticipant
from interlens.errors import ParticipantError, WorkerError
from interlens.runner.store import read_journal
from tests.runner.talk import about, essence, logged, rows, talk, words

TWO = ["cpu", "cpu"]


def pooled(conv: Conversation, n: int | None = None, devices: Any = TWO, **options: Any) -> RunReport:
    return conv.rollout(n, devices=devices, progress=False, **options)


def alone(conv: Conversation, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, progress=False, **options)


def plain(report: RunReport) -> dict[str, Any]:
    """All records, but for where they were made."""
    return {job: {k: v for k, v in r.items() if k != "device"} for job, r in essence(report).items()}


def row_of(view: Any) -> int:
    return int(view.messages[0]["content"].split("topic ")[1].split(".")[0])


def trouble_at(**kinds: Any) -> Conversation:
    """Two who talk about twelve topics; at some of them the second one does something else."""

    def speak(view: Any) -> str:
        for number, what in kinds.values():
            if number == row_of(view):
                what()
        return words(view)

    people = [FunctionParticipant("ada", words, version="1"), FunctionParticipant("bob", speak, version="1")]
    return about(Conversation(people).turns(2), 12)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deaths(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder) if event["event"] == "died"]


# -- the same as without


@pytest.mark.parametrize("devices", [TWO, ["cpu"] * 3])
def test_the_same_records_as_in_this_process(tmp_path: Path, devices: list[str]) -> None:
    """Closures, a lambda, a hook with state, a stop that counts, an analyzer that asks."""
    seen: list[int] = []

    class Counting:
        """A hook that must not be shared: it edits by what it alone has seen."""

        def __init__(self) -> None:
            self.reviewed = 0

        def review(self, message: Any, conversation: Any) -> Any:
            self.reviewed += 1
            return interlens.edit(f"{message.content} {self.reviewed}")

    conv = about(talk(turns=4).set(message_hooks=Counting()), 30)
    conv = conv.analyzer(again=lambda c: c.sample("ada").content, seen=lambda c: len(seen))
    here, there = alone(conv, seed=5), pooled(conv, devices=devices, seed=5, out_dir=tmp_path)
    assert plain(there) == plain(here)
    assert list(there.results) == list(here.results)
    assert plain(RunReport.load(tmp_path, trust=True)) == plain(here)
    assert {r.device for r in there.results.values()} <= {f"cpu#{i}" for i in range(len(devices))}
    assert there["row_00003"].conversation.transcript == here["row_00003"].conversation.transcript


def test_without_a_folder_a_report_holds_everything_while_it_lives(tmp_path: Path) -> None:
    report = pooled(about(talk(turns=2), 6))
    assert report.out_dir is None
    assert plain(report) == plain(alone(about(talk(turns=2), 6)))
    [place] = {r._place.file.parent.parent for r in report.results.values()}
    assert place.exists()
    del report
    assert not place.exists()


def test_many_lineups_in_one_pool() -> None:
    lineups = [about(talk(turns=2), 5).name("x"), talk(turns=3).name("solo"), talk(turns=1).name("y")]
    report = interlens.run(lineups, devices=TWO, progress=False)
    assert list(report.results) == [*(f"x/row_0000{i}" for i in range(5)), "solo", "y"]
    assert plain(report) == plain(interlens.run(lineups, progress=False))


def test_a_run_goes_on_with_any_number_of_workers(tmp_path: Path) -> None:
    """Begun by two, stopped, gone on with by one, stopped, ended by three: nothing logged is asked again."""
    folder = tmp_path / "run"

    def hooked(stage: int) -> Conversation:
        asked = tmp_path / f"asked-{stage}"
        asked.touch()

        def speak(view: Any) -> str:
            with open(asked, "a") as file:
                file.write(f"{row_of(view)} {len(view.messages) - 1}\n")
            return words(view)

        people = [FunctionParticipant(name, speak, version="1") for name in ("ada", "bob")]
        return about(Conversation(people).turns(4), 24)

    known: set[str] = set()
    for stage, (devices, stop_after) in enumerate(((TWO, 6), (None, 14), (["cpu"] * 3, 99))):
        told: list[Any] = []

        def watch(event: Any, told: list[Any] = told, stop_after: int = stop_after) -> None:
            told.append(event)
            if len(told) == stop_after:
                raise OSError("enough")

        options = {"devices": devices, "out_dir": folder, "on_event": watch, "max_batch_size": 2}
        if stop_after < 24:
            with pytest.raises(OSError, match="enough"):
                pooled(hooked(stage), **options)
        else:
            report = pooled(hooked(stage), **options)
        asked = (tmp_path / f"asked-{stage}").read_text().split("\n")[:-1]
        assert len(asked) == len(set(asked))
        assert not known & set(asked)
        known = {f"{job} {path.split('/')[1]}" for job, path in logged(folder, "call")}
    assert len(known) == 24 * 4
    assert report.complete
    assert not report.failed
    assert report.transcripts() == alone(hooked(9)).transcripts()


# -- trouble


def test_eight_kinds_of_trouble_harm_nobody_else(tmp_path: Path) -> None:
    class Local(Exception):
        def __init__(self, *, needed: str) -> None:
            super().__init__(needed)

    def local() -> None:
        raise Local(needed="text")

    def huge() -> None:
        raise MemoryError

    conv = trouble_at(
        killed=(1, die),
        left=(2, lambda: os._exit(0)),
        crashed=(3, lambda: ctypes.string_at(0)),
        exits=(4, sys.exit),
        local=(5, local),
        huge=(6, huge),
    )

    def odd(c: Conversation) -> Any:
        number = int(c.row["topic"].split()[1])
        return threading.Lock() if number == 7 else local() if number == 8 else number

    report = pooled(conv.analyzer(odd), out_dir=tmp_path)
    failed = {f"row_0000{i}" for i in range(1, 7)}
    assert set(report.failed) == failed
    good = {job: r for job, r in report.results.items() if job not in failed}
    assert all(r.outcome == "done" and len(r.transcript) == 3 for r in good.values())
    assert {job for job, r in report.results.items() if r.quarantined} == {f"row_0000{i}" for i in (1, 2, 3)}
    for i, why in ((1, "SIGKILL"), (2, "status 0"), (3, "SIGSEGV")):
        assert why in str(report[f"row_0000{i}"].error)
        assert 2 <= report[f"row_0000{i}"].attempts <= 4
    assert "SystemExit" in str(report["row_00004"].error)
    assert "Local: text" in str(report["row_00005"].error)
    assert "MemoryError" in str(report["row_00006"].error)
    assert "lock cannot be stored" in report["row_00007"].analysis_error
    assert "Local: text" in report["row_00008"].analysis_error
    assert report["row_00009"].analysis == 9
    assert "3 quarantined" in repr(report)
    again = pooled(conv.analyzer(odd), out_dir=tmp_path)
    assert set(again.failed) == failed
    assert again["row_00001"].attempts == report["row_00001"].attempts + 1  # once more, alone at once
    assert "WorkerDied" in again["row_00001"].earlier_errors[0]


def test_a_poison_job_costs_two_crashes_and_innocents_nothing(tmp_path: Path) -> None:
    conv = about(trouble_at(poison=(20, die)), 32)
    report = pooled(conv, out_dir=tmp_path, max_batch_size=32)
    assert report.failed == ["row_00020"]
    assert len(deaths(tmp_path)) == 2
    assert deaths(tmp_path)[1]["jobs"] == ["row_00020"]
    begun_twice = [job for job, r in report.results.items() if r.attempts > 1]
    assert set(begun_twice) <= set(deaths(tmp_path)[0]["jobs"])


def test_a_worker_killed_from_outside_is_replaced_soon(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def speak(view: Any) -> str:
        if not pids.exists():
            pids.write_text(str(os.getpid()))
            time.sleep(60)
        return words(view)

    conv = about(Conversation([FunctionParticipant("ada", speak, version="1")]).turns(2), 12)
    told: list[Any] = []
    began: list[float] = []

    def watch(event: Any) -> None:
        told.append(event)
        if event["kind"] == "job" and not began:
            began.append(time.monotonic())
            os.kill(int(pids.read_text()), signal.SIGKILL)
        if event["kind"] == "died":
            began.append(time.monotonic())

    report = pooled(conv, out_dir=tmp_path / "run", on_event=watch)
    assert not report.failed
    assert len(report) == 12
    assert began[1] - began[0] < 2
    assert len(deaths(tmp_path / "run")) == 1


def test_a_job_that_hangs_is_ended_with_its_stack(tmp_path: Path) -> None:
    def hang_here() -> None:
        time.sleep(3600)

    report = pooled(trouble_at(hangs=(3, hang_here)), out_dir=tmp_path, stall_timeout=2.5, max_batch_size=2)
    assert report.failed == ["row_00003"]
    assert "nothing moved" in str(report["row_00003"].error)
    assert "hang_here" in str(report["row_00003"].error)


def test_a_long_call_is_waited_for(tmp_path: Path) -> None:
    report = pooled(trouble_at(slow=(3, lambda: time.sleep(4))), out_dir=tmp_path, max_batch_size=1)
    assert not report.failed
    assert not deaths(tmp_path)


def test_an_analyzer_that_ends_its_worker_leaves_the_conversation(tmp_path: Path) -> None:
    def deadly(c: Conversation) -> int:
        if c.row["topic"] == "topic 4":
            die()
        return 1

    report = pooled(
        about(talk(turns=2), 8).analyzer(deadly=deadly, size=lambda c: len(c.transcript)), out_dir=tmp_path
    )
    assert not report.failed
    assert report.counts() == {"done": 8, "limit": 0, "failed": 0, "analysis_failed": 1}
    assert "a worker ended twice" in report["row_00004"].analysis_error["deadly"]
    assert report["row_00004"].analysis == {"deadly": None, "size": 3}


def test_workers_that_cannot_begin_end_the_run_with_their_own_words(tmp_path: Path) -> None:
    from interlens.runner import analyzers

    def init() -> None:
        raise FileNotFoundError("the probe is not on this disk")

    analyzers._INITS.append(init)
    began = time.monotonic()
    try:
        with pytest.raises(WorkerError, match="3 workers in a row") as error:
            pooled(talk(turns=1), 8, out_dir=tmp_path)
    finally:
        analyzers._INITS.remove(init)
    assert "the probe is not on this disk" in str(error.value)
    assert "Traceback" in str(error.value)
    assert time.monotonic() - began < 20
    assert len(pooled(talk(turns=1), 8, out_dir=tmp_path)) == 8


def test_a_recipe_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    conv = talk(turns=1).analyzer(lambda c: lock.locked())
    with pytest.raises(TypeError, match=r"cannot be sent to worker processes: .*lock"):
        pooled(conv, 2)


def test_a_row_that_cannot_be_sent_is_its_own_failure() -> None:
    data = [{"topic": "a", "x": 1}, {"topic": "b", "x": threading.Lock()}]
    report = pooled(talk(turns=1).data(data))
    assert report.failed == ["row_00001"]
    assert "cannot be sent to a worker" in str(report["row_00001"].error)


def test_data_that_fails_half_way_ends_the_run_and_keeps_what_ended(tmp_path: Path) -> None:
    def broken() -> Any:
        yield from rows(9)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        pooled(talk(turns=1).data(broken()), max_batch_size=1, out_dir=tmp_path)
    assert len(RunReport.load(tmp_path, trust=True)) >= 6
    assert not (tmp_path / "owner.lock").exists()


# -- what is handed over


def test_arrays_and_large_results_come_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def measure(c: Conversation) -> Any:
        return {
            "mean": numpy.arange(6.0).reshape(2, 3),
            "ids": torch.tensor([[1, 2], [3, 4]]),
            "odd": [numpy.float32(1.5), float("nan"), "é\u2028"],
            "text": "x" * 5_000_000,
        }

    for conv, out in ((talk(turns=1), tmp_path / "a"), (talk(turns=1), None)):
        report = pooled(conv.analyzer(measure), 3, out_dir=out)
        found = report["rollout_00001"].analysis
        assert isinstance(found["mean"], numpy.ndarray)
        assert found["mean"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert torch.equal(found["ids"], torch.tensor([[1, 2], [3, 4]]))
        assert found["odd"][0] == 1.5
        assert found["odd"][2] == "é\u2028"
        assert len(found["text"]) == 5_000_000
        assert report["rollout_00001"].conversation.analysis["mean"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rows_are_not_piled_up() -> None:
    """At most what runs and one more is ahead of what has ended."""
    ahead: list[int] = []
    pulled, ended = [0], [0]

    def stream() -> Any:
        for row in rows(400):
            pulled[0] += 1
            ahead.append(pulled[0] - ended[0])
            yield row

    def watch(event: Any) -> None:
        ended[0] = event["done"]

    conv = talk(turns=1).set(shared_context=lambda row: row["topic"])
    report = pooled(conv.data(stream()), n=300, max_batch_size=4, on_event=watch)
    assert len(report) == 300
    assert pulled[0] <= 301
    assert max(ahead) < 200


def test_worker_inits_and_names_travel(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def init() -> None:
        (marks / str(os.getpid())).touch()

    from interlens.runner import analyzers

    interlens.register_worker_init(init)
    interlens.register_analyzer("who", lambda c: os.getpid())
    try:
        report = pooled(talk(turns=1).analyzer("who"), 12, max_batch_size=2)
    finally:
        analyzers._INITS.remove(init)
    who = {str(pid) for pid in report.analyses().values()}
    assert who <= {p.name for p in marks.iterdir()}
    assert str(os.getpid()) not in who


def test_events_and_the_log_of_a_worker(tmp_path: Path) -> None:
    def speak(view: Any) -> str:
        print("said from a worker", flush=True)
        return words(view)

    told: list[Any] = []
    conv = Conversation([FunctionParticipant("ada", speak, version="1")], shared_context="Begin.").turns(1)
    pooled(conv, 6, out_dir=tmp_path, on_event=told.append)
    assert sorted(e["id"] for e in told) == [f"rollout_0000{i}" for i in range(6)]
    assert [e["done"] for e in told] == [1, 2, 3, 4, 5, 6]
    logs = "".join(p.read_text() for p in (tmp_path / "logs").glob("worker-*.log"))
    assert logs.count("said from a worker") == 6
    events = [e["event"] for e in read_journal(tmp_path)]
    assert events == ["begin", "end"]


def test_adding_an_analyzer_runs_nothing_but_the_analyzer(tmp_path: Path) -> None:
    asked = tmp_path / "asked"

    def speak(view: Any) -> str:
        with open(asked, "a") as file:
            file.write("x")
        return words(view)

    conv = about(Conversation([FunctionParticipant("ada", speak, version="1")]).turns(3), 6)
    first = conv.analyzer(size=lambda c: len(c.transcript))
    pooled(first, out_dir=tmp_path / "run")
    assert len(asked.read_text()) == 18
    counted: list[int] = []

    def count(c: Conversation) -> int:
        counted.append(1)
        return len(c.transcript)

    more = conv.analyzer(size=lambda c: len(c.transcript), last=lambda c: c.transcript[-1].content)
    report = alone(more, out_dir=tmp_path / "run", extend=True)
    assert len(asked.read_text()) == 18
    assert report["row_00002"].analysis == {"size": 4, "last": report["row_00002"].transcript[-1].content}
    assert report["row_00002"].attempts == 1
    other = conv.analyzer(size=count, last=lambda c: c.transcript[-1].content)
    report = alone(other, out_dir=tmp_path / "run", extend=True)
    assert len(counted) == 6  # another version of it; the other one is kept
    assert len(asked.read_text()) == 18
    loaded = RunReport.load(tmp_path / "run", trust=True)
    assert loaded.analyses() == report.analyses()
    versions = {a["version"] for a in loaded["row_00001"].record["analyses"].values()}
    assert len(versions) == 2


def test_arrays_of_an_analysis_stay_when_another_is_added(tmp_path: Path) -> None:
    conv = talk(turns=1)

    def two(c: Conversation) -> Any:
        return [numpy.full(2, 2.0), numpy.full(3, 3.0)]

    first = conv.analyzer(a=lambda c: numpy.ones(2))
    assert alone(first, 2, out_dir=tmp_path)["rollout_00001"].analysis["a"].tolist() == [1, 1]
    more = conv.analyzer(a=lambda c: numpy.ones(2), b=two)
    for devices in (None, TWO):
        found = pooled(more, 2, devices=devices, out_dir=tmp_path, extend=True)["rollout_00001"].analysis
        assert found["a"].tolist() == [1, 1]
        assert [x.tolist() for x in found["b"]] == [[2, 2], [3, 3, 3]]
    other = conv.analyzer(a=lambda c: numpy.zeros(2), b=two)  # another version of one of them
    found = alone(other, 2, out_dir=tmp_path, extend=True)["rollout_00001"].analysis
    assert (found["a"].tolist(), found["b"][0].tolist()) == ([0, 0], [2, 2])


def test_participants_that_fail_fail_their_job_alone() -> None:
    def flaky(view: Any) -> str:
        if row_of(view) == 2:
            raise ParticipantError("overloaded")
        return words(view)

    people = [ScriptedParticipant("ada", words), FunctionParticipant("bob", flaky, version="1")]
    report = pooled(about(Conversation(people).turns(2), 5))
    assert report.failed == ["row_00002"]
    assert "overloaded" in str(report["row_00002"].error)


class Unreadable:
    """Can be sent, and cannot be read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_row_that_a_worker_cannot_read_is_its_own_failure() -> None:
    data = [{"topic": "a", "x": Unreadable()}, {"topic": "b", "x": 1}, {"topic": "c", "x": 1}]
    report = pooled(talk(turns=1).data(data))
    assert report.failed == ["row_00000"]
    assert "cannot be read by a worker: invalid literal" in str(report["row_00000"].error)


def test_models_in_workers(tmp_path: Path) -> None:
    """The same tokens and activations as here; the manifest says what the models claim."""
    torch = pytest.importorskip("torch")
    people = [
        interlens.AutoModelParticipant.from_pretrained("tiny", name=name, max_new_tokens=10) for name in "ab"
    ]
    conv = Conversation(people, shared_context="Hello.").turns(3)
    conv = conv.hook(interlens.Capture(layers=(0, 1), span=interlens.Span(phase="generated")))
    here, there = alone(conv, 6, seed=3), pooled(conv, 6, seed=3, out_dir=tmp_path)
    assert there.transcripts() == here.transcripts()
    found = [r.activations(site="resid_post.1") for r in (here, there, RunReport.load(tmp_path))]
    assert all(torch.equal(f.tensor, found[0].tensor) for f in found)
    assert all(f.frame().equals(found[0].frame()) for f in found)
    assert json.loads((tmp_path / "manifest.json").read_text())["models"]["tiny"]["exact"] is True
    assert {r.device for r in there.results.values()} == {"cpu#0", "cpu#1"}

    def norm(c: Conversation) -> list[float]:
        """Of an analyzer that is added later: it sees what the turns captured."""
        return [a.tensor.norm().item() for m in c.transcript[1:] for a in m.activations]

    added = pooled(conv.analyzer(norm), 6, seed=3, out_dir=tmp_path, extend=True)
    assert added.analyses() == alone(conv.analyzer(norm), 6, seed=3).analyses()
    assert len(added["rollout_00001"].analysis) == 6


def test_a_model_that_does_not_load_ends_the_run_and_keeps_what_was_done(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    pytest.importorskip("torch")
    from interlens.engine.load import tiny

    model, tokenizer = tiny()
    model.save_pretrained(broken)
    tokenizer.save_pretrained(broken)
    [weights] = broken.glob("*.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:100])
    people = [interlens.AutoModelParticipant.from_pretrained(str(broken), name="a", max_new_tokens=4)]
    conv = Conversation(people, shared_context="Hello.").turns(1)
    with pytest.raises(WorkerError, match=r"3 workers in a row(.|\n)*did not load"):
        pooled(conv, 40, out_dir=tmp_path / "run", max_batch_size=2)
    with pytest.raises(interlens.errors.ModelError, match="did not load"):
        alone(conv, 40, out_dir=tmp_path / "run")
    assert len(RunReport.load(tmp_path / "run")) == 0
    weights.write_bytes(data)
    assert pooled(conv, 40, out_dir=tmp_path / "run").counts()["done"] == 40


def test_the_line_moves_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    from interlens.runner.progress import Line

    monkeypatch.setattr(Line, "show", lambda self, tally, last=False: shown.append(tally.line()))
    slow = Conversation(
        [FunctionParticipant("a", lambda view: str(time.sleep(1)))], shared_context="x"
    ).turns(1)
    alone(slow, 1)
    assert len(shown) >= 4


def test_a_budget_around_the_call_reaches_workers_and_the_recipe(tmp_path: Path) -> None:
    conv = talk(turns=8)
    with interlens.TokenBudget(per_conversation=10, per_turn=3):
        report = pooled(conv, 4, out_dir=tmp_path)
        here = alone(conv, 4)
    assert {r.tokens_generated for r in report.results.values()} == {10}
    assert plain(report) == plain(here)
    with pytest.raises(interlens.errors.RecipeChanged, match="run_until"):
        pooled(conv, 4, out_dir=tmp_path)


@pytest.mark.parametrize("devices", [None, TWO])
def test_a_model_that_no_job_needs_is_freed(devices: Any) -> None:
    def lineup(dtype: str) -> Conversation:
        made = interlens.AutoModelParticipant.from_pretrained("tiny", name="a", dtype=dtype, max_new_tokens=2)
        conv = Conversation([made], shared_context="Hello.").turns(1).set(data=rows(6)).name(dtype)
        return conv.analyzer(_resident)

    interlens.unload()
    report = interlens.run(
        [lineup("float32"), lineup("bfloat16")], devices=devices, progress=False, max_batch_size=1
    )
    found = list(report.analyses().values())
    assert found[0] in (["float32"], ["bfloat16"])
    assert ["float32"] in found
    assert found[-1] == ["bfloat16"]
    assert not report.failed
    interlens.unload()


def _resident(conv: Conversation) -> list[str]:
    from interlens.runner.scheduler import scheduler

    return sorted(str(spec.dtype) for spec in scheduler().call(lambda: scheduler().pool.resident()))
