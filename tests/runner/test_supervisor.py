"""The supervisor over devices in virtual time: deaths, hangs and blame, without a process."""

import heapq
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlens.errors import WorkerError
from interlens.rollouts import Lineup
from interlens.runner.execute import Settings, manifest_of
from interlens.runner.executor import Ended, Work
from interlens.runner.fleet import Link
from interlens.runner.jobs import Attempt, Job, begun
from interlens.runner.ledger import index_records, read_record, record_line
from interlens.runner.lines import encoded
from interlens.runner.store import RunStore, read_journal
from interlens.runner.supervisor import LOADING, Plan, Supervisor
from tests.runner.talk import talk

Says = Callable[["Device", Attempt, list[Any]], list[tuple[float, Any]]]
"""What a device says of a job: when, counted from its beginning, and what; `None` is its death."""


def record(attempt: Attempt) -> bytes:
    fields = {"outcome": "done", "reason": "turns", "transcript": [], "tokens": 1, "analyses": {}}
    return record_line(begun(attempt) | fields)


def well(device: "Device", attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
    return [(0.0, ("begun", attempt.job.id)), (1.0, ("record", attempt.job.id, record(attempt)))]


class Fleet:
    """Devices whose time passes when nothing is due."""

    def __init__(self, devices: int, says: Says) -> None:
        self.says = says
        self.places: dict[str, str | None] = {f"sim#{i}": "cpu" for i in range(devices)}
        self.time = 0.0
        self.started: list[Device] = []
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Device, Any]] = []

    def start(self, place: str, setup: bytes = b"") -> "Device":
        device = Device(self, place)
        self.started.append(device)
        self.say(device, 0.5, ("ready", True))
        return device

    def say(self, device: "Device", after: float, message: Any) -> None:
        heapq.heappush(self._due, (self.time + after, next(self._numbers), device, message))

    def poll(self, timeout: float) -> list[tuple[Link, Any]]:
        if not self._due or self._due[0][0] > self.time + timeout:
            self.time += timeout
            return []
        self.time, _, device, message = heapq.heappop(self._due)
        if device.dead:
            return []
        device.dead = message is None
        return [(device, message)]

    def now(self) -> float:
        return self.time

    def close(self) -> None:
        """Nothing is open."""


class Device:
    def __init__(self, fleet: Fleet, place: str) -> None:
        self.fleet, self.place, self.dead = fleet, place, False
        self.holds = 0
        self.most = 0
        self.got: list[tuple[str, int]] = []
        """Jobs it was given, and how many it held then."""

    def send(self, message: Any) -> None:
        if message[0] == "job":
            attempt = pickle.loads(message[2])
            self.holds += 1
            self.most = max(self.most, self.holds)
            self.got.append((attempt.job.id, self.holds))
            for after, said in self.fleet.says(self, attempt, message[3]):
                self.fleet.say(self, after, said)
                self.holds -= said is not None and said[0] == "record"
        elif message[0] == "stop":
            self.fleet.say(self, 0.0, None)

    def kill(self) -> None:
        self.fleet.say(self, 0.0, None)

    def stack(self) -> str:
        return "File stack.py, in hang"

    def obituary(self) -> str:
        return "it was killed"


def supervised(
    folder: Path,
    says: Says,
    *,
    jobs: int = 20,
    devices: int = 2,
    limit: int = 4,
    patience: float | None = None,
) -> tuple[Fleet, list[Ended]]:
    fleet, ended = Fleet(devices, says), []
    manifest = manifest_of([Lineup(talk(1))], Settings(n=jobs), jobs)
    store = RunStore(folder, manifest, resume=True, extend=False)
    source = (
        Work(slot=i, attempt=Attempt(job=Job(id=f"job_{i:03d}", seed=i, number=i)), log=list)
        for i in range(jobs)
    )
    plan = Plan(
        places=list(fleet.places),
        start=fleet.start,
        models=[frozenset()],
        limit=limit,
        left=lambda: jobs - len(ended),
        patience=patience,
        ended=ended.append,
        event=lambda event: None,
        spend=lambda place, tokens: None,
    )
    try:
        Supervisor(fleet, store, plan, [source]).run(lambda: None)
    finally:
        store.close()
    return fleet, ended


def outcomes(folder: Path) -> dict[str, tuple[str, int]]:
    return {job: (place.outcome, place.attempts) for job, place in index_records(folder).items()}


def test_all_jobs_once_and_evenly(tmp_path: Path) -> None:
    fleet, ended = supervised(tmp_path, well, jobs=20, devices=4, limit=64)
    assert sorted(e.id for e in ended) == [f"job_{i:03d}" for i in range(20)]
    assert [len(d.got) for d in fleet.started] == [5, 5, 5, 5]
    assert set(outcomes(tmp_path).values()) == {("done", 1)}
    assert fleet.time < 2


def poisoned(*bad: str) -> Says:
    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        if attempt.job.id in bad:
            return [(0.0, ("begun", attempt.job.id)), (0.5, None)]
        return well(device, attempt, log)

    return says


def test_suspects_run_alone_and_one_is_given_up(tmp_path: Path) -> None:
    fleet, ended = supervised(tmp_path, poisoned("job_009"), jobs=40, limit=8)
    assert len(ended) == 40
    found = outcomes(tmp_path)
    assert [job for job, (outcome, _) in found.items() if outcome == "failed"] == ["job_009"]
    assert index_records(tmp_path)["job_009"].kind.quarantined
    deaths = [e for e in read_journal(tmp_path) if e["event"] == "died"]
    assert len(deaths) == 2
    assert deaths[1]["jobs"] == ["job_009"]
    assert len(fleet.started) == 4
    solo = [held for d in fleet.started for job, held in d.got if job == "job_009"]
    assert solo[-1] == 1


@pytest.mark.parametrize("bad", [("job_001", "job_002"), ("job_000", "job_010", "job_039")])
def test_several_poisons(tmp_path: Path, bad: tuple[str, ...]) -> None:
    _, ended = supervised(tmp_path, poisoned(*bad), jobs=40, limit=8, devices=3)
    assert len(ended) == 40
    assert tuple(j for j, (outcome, _) in sorted(outcomes(tmp_path).items()) if outcome == "failed") == bad


def test_what_had_not_begun_is_not_blamed(tmp_path: Path) -> None:
    died: list[Device] = []

    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        if not died or died == [device]:
            died[:] = [device]
            first = len(device.got) == 1
            return [(0.0, ("begun", attempt.job.id)), (0.2, None)] if first else []
        return well(device, attempt, log)

    _, ended = supervised(tmp_path, says, jobs=12, devices=1)
    assert len(ended) == 12
    found = outcomes(tmp_path)
    assert [job for job, (_, attempts) in found.items() if attempts > 1] == ["job_000"]
    assert {outcome for outcome, _ in found.values()} == {"done"}


def test_a_device_without_a_sign_is_ended(tmp_path: Path) -> None:
    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        if attempt.job.id == "job_003":
            return [
                (0.0, ("begun", attempt.job.id)),
                *((float(t), ("beat", 7, None, 0)) for t in range(1, 99)),
            ]
        return well(device, attempt, log)

    fleet, ended = supervised(tmp_path, says, jobs=8, patience=30)
    assert len(ended) == 8
    lost = read_record(index_records(tmp_path)["job_003"])
    assert "nothing moved in it for 30 s" in lost["message"]
    assert "in hang" in lost["error"]["traceback"]
    assert 60 < fleet.time < 75


def test_what_moves_and_what_loads_is_waited_for(tmp_path: Path) -> None:
    """Steps of a long reply are movement; a model that is loading may take an hour."""

    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        job = attempt.job.id
        if job == "job_000":
            beats = [(float(t), ("beat", t, None, t)) for t in range(1, 3000, 20)]
            return [(0.0, ("begun", job)), *beats, (3000.0, ("record", job, record(attempt)))]
        if job == "job_001":
            return [
                (0.0, ("begun", job)),
                (1.0, ("beat", 1, "a model", 0)),
                (LOADING - 10, ("record", job, record(attempt))),
            ]
        return well(device, attempt, log)

    _, ended = supervised(tmp_path, says, jobs=4, limit=1, patience=30)
    assert len(ended) == 4
    assert set(outcomes(tmp_path).values()) == {("done", 1)}


def test_a_job_goes_on_from_what_it_had_logged(tmp_path: Path) -> None:
    logs: list[list[Any]] = []

    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        logs.append(log)
        job = attempt.job.id
        if attempt.number < 2:
            line = encoded({"job": job, "path": f"turn/{attempt.number}"})
            return [(0.0, ("begun", job)), (0.2, ("entry", job, line)), (0.4, None)]
        return well(device, attempt, log)

    def twice(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        return (
            says(device, attempt, log)
            if attempt.number < 2
            else (logs.append(log), well(device, attempt, log))[1]
        )

    supervised(tmp_path, twice, jobs=1, devices=1)
    assert [[e["path"] for e in log] for log in logs] == [[], ["turn/1"]]


def test_devices_that_never_begin_end_the_run(tmp_path: Path) -> None:
    class Broken(Fleet):
        def start(self, place: str, setup: bytes = b"") -> Device:
            device = Device(self, place)
            self.say(
                device, 0.1, ("broken", {"type": "OSError", "message": "no disk", "traceback": "in init"})
            )
            self.say(device, 0.2, None)
            return device

    fleet = Broken(2, well)
    store = RunStore(tmp_path, manifest_of([Lineup(talk(1))], Settings(n=1), 1), resume=True, extend=False)
    plan = Plan(
        places=list(fleet.places),
        start=fleet.start,
        models=[frozenset()],
        limit=1,
        left=lambda: 1,
        patience=None,
        ended=lambda ended: None,
        event=lambda event: None,
        spend=lambda place, tokens: None,
    )
    source = iter([Work(slot=0, attempt=Attempt(job=Job(id="a", seed=0, number=0)), log=list)])
    with pytest.raises(WorkerError, match=r"3 workers in a row could not begin(.|\n)*in init"):
        Supervisor(fleet, store, plan, [source]).run(lambda: None)
    store.close()


def test_an_analyzer_that_kills_is_left_out_the_third_time(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def says(device: Device, attempt: Attempt, log: list[Any]) -> list[tuple[float, Any]]:
        job = attempt.job.id
        if job != "job_002":
            return well(device, attempt, log)
        seen.append(dict(attempt.broken))
        if not attempt.broken:
            return [(0.0, ("begun", job)), (0.1, ("analysing", job, "deadly")), (0.2, None)]
        return well(device, attempt, log)

    _, ended = supervised(tmp_path, says, jobs=6)
    assert len(ended) == 6
    assert [list(b) for b in seen] == [[], [], ["deadly"]]
    assert "ended twice" in seen[2]["deadly"]["message"]
    assert {outcome for outcome, _ in outcomes(tmp_path).values()} == {"done"}
