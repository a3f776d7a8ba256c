"""Workers of a Ray cluster: the same records, whatever process or node dies.

What supervisor and actor say to each other is tested without Ray; the rest on two nodes of this machine
(`-m ray`).
"""

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import interlens
from interlens import AutoModelParticipant, Capture, Conversation, FunctionParticipant, RunReport
from interlens.errors import Stopped, WorkerError
from interlens.runner import analyzers, cluster, worker, workers
from interlens.runner.cluster import Inside, RayFleet, RayLink, Room, rooms
from interlens.runner.store import RunStore, read_journal
from interlens.runner.supervisor import LOSSES, Supervisor
from tests.runner.talk import about, essence, logged, talk, words
from tests.runner.test_supervisor import supervised, well

ROOT = Path(__file__).parents[2]


# -- without Ray


class Unreachable(Exception):
    """In the place of Ray's `ActorUnavailableError`."""


class Broken(Exception):
    """In the place of an error in an actor's constructor."""

    actor_init_failed = True


class FakeRay:
    """Calls in threads, whose requests and answers get lost by the throw of a die."""

    exceptions = SimpleNamespace(ActorUnavailableError=Unreachable)

    def __init__(self, seed: int = 0, lost: float = 0.0) -> None:
        self.chance, self.lost = random.Random(seed), lost
        self.killed: list[Any] = []

    def actor(self, target: Any) -> Any:
        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *args: self._call(getattr(target, name), args))

        return SimpleNamespace(**{name: method(name) for name in ("push", "pull", "stack")})

    def _call(self, fn: Any, args: Any) -> "futures.Future[Any]":
        future: futures.Future[Any] = futures.Future()
        fate, delay = self.chance.random(), self.chance.random() * 0.003

        def work() -> None:
            time.sleep(delay)
            answer = fn(*args) if fate >= self.lost / 2 else None
            if fate < self.lost:
                future.set_exception(Unreachable("The actor is unavailable"))
            else:
                future.set_result(answer)

        threading.Thread(target=work, daemon=True).start()
        return future

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        return ref.result(timeout)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def failing(ray: FakeRay, error: Exception) -> Callable[[], Any]:
    """Makes actors that Ray does not bring to life."""
    failed: futures.Future[Any] = futures.Future()
    failed.set_exception(error)

    def pull(fetched: int) -> Any:
        raise error

    target = SimpleNamespace(push=None, pull=pull, stack=None)
    made = ray.actor(target)
    made.pull.remote = lambda *args: failed
    return lambda: made


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_doubled_or_out_of_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of 150 messages each way, a third of the requests and answers are lost on the way."""
    heard: list[Any] = []

    def echo(channel: Any, setup: bytes) -> int:
        channel.send(("ready", setup))
        while (message := channel.receive()) != ("stop",):
            heard.append(message)
            channel.send(("said", *message))
            if message[1] % 10 == 0:
                channel.send(("begun", message[1]))
                heard.append(("known", link._fetched >= 2 + message[1] + message[1] // 10 + 1))
        return 7

    monkeypatch.setattr(worker, "serve", echo)
    monkeypatch.setattr(cluster, "_LISTEN", 0.02)
    ray = FakeRay(seed, lost=0.33)
    link = RayLink(ray, "ray#0", "1 CPU", lambda: ray.actor(Inside(b"setup")), 0.0)
    sent = [("job", i) for i in range(150)]
    for message in sent:
        link.send(message)
    came: list[Any] = []
    now, stopped, end = 0.0, False, time.monotonic() + 30
    while not link.over:
        assert time.monotonic() < end, f"{len(came)} came"
        for ref in [ref for ref in list(link.asked) if ref.done()]:
            came += link.take(ref, now)
        now += 1.5
        came += link.waits(now)
        if not stopped and len(came) > 10:
            link.send(("stop",))
            stopped = True
        time.sleep(0.001)
    said = [m for m in came if m is None or m[0] != "beat"]
    assert [m for m in heard if m[0] == "job"] == sent
    assert [m for m in heard if m[0] == "known"] == [("known", True)] * 15
    assert [m for m in said if m is not None and m[0] == "begun"] == [("begun", i) for i in range(0, 150, 10)]
    others = [m for m in said if m is None or m[0] != "begun"]
    assert others == [("ready", b"setup"), *(("said", *m) for m in sent), None]
    assert link.obituary() == "it ended with status 7"
    assert link.asked == {}
    link.send(("job", 151))
    assert link.asked == {}


def test_a_worker_waits_while_nobody_fetches_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def say(channel: Any, setup: bytes) -> int:
        for i in range(10):
            channel.send(("entry", "x" * 400))
            sent.append(i)
        return 0

    monkeypatch.setattr(worker, "serve", say)
    monkeypatch.setattr(cluster, "_FULL", 1000)
    inside = Inside(b"")
    fetched, rounds = 0, 0
    while fetched < 10:
        said, _ = inside.pull(fetched)
        assert 1 <= len(said) <= 3
        fetched, rounds = fetched + len(said), rounds + 1
        assert len(sent) <= fetched + 3
    assert rounds > 2


def test_an_actor_that_ray_loses_before_it_begins_is_asked_for_again() -> None:
    ray = FakeRay()
    makes: list[int] = []
    lost = failing(ray, RuntimeError("The actor died because its node has died. Node Id: 12"))

    def make() -> Any:
        makes.append(1)
        return lost()

    link = RayLink(ray, "ray#0", "1 CPU", make, 0.0)
    ends = [link.take(next(iter(link.asked)), 0.0) for _ in range(3)]
    assert ends == [[], [], [("lost",), None]]
    assert len(makes) == 3
    assert "its node has died" in link.obituary()
    link = RayLink(ray, "ray#0", "1 CPU", failing(ray, Broken("No module named 'interlens'")), 0.0)
    assert link.take(next(iter(link.asked)), 0.0) == [None]
    assert link.obituary() == "No module named 'interlens'"


def test_an_actor_without_room_shows_signs_of_life_and_can_be_told_to_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray = FakeRay()
    never = SimpleNamespace(pull=lambda fetched: threading.Event().wait(), push=None, stack=None)
    link = RayLink(ray, "ray#3", "4 CPUs", lambda: ray.actor(never), 0.0)
    signs = [sign for now in range(1, 100) for sign in link.waits(float(now))]
    assert len(signs) == 99
    assert len(set(signs)) == 99  # each differs from the one before: something moves
    assert [r.message for r in caplog.records] == [
        "ray#3 waits for 4 CPUs: the cluster has no room for it now"
    ]
    assert not ray.killed
    link.send(("over", 0))
    link.send(("stop",))
    assert len(ray.killed) == 1
    assert len(link.asked) == 1  # nothing but the question for news, which tells of the end


def test_an_actor_that_is_never_reached_again_is_given_up() -> None:
    ray = FakeRay()
    link = RayLink(ray, "ray#0", "1 CPU", failing(ray, Unreachable("RPC error")), 100.0)
    out: list[Any] = []
    now = 100.0
    while not link.over:
        out += [message for ref in list(link.asked) for message in link.take(ref, now)]
        now += 2.0
        list(link.waits(now))
    assert out == [("lost",), None]
    assert 215 < now < 230
    assert link.obituary() == "RPC error"


def test_what_is_lost_with_its_machine_is_not_to_blame(tmp_path: Path) -> None:
    """Four machines of four are lost at once, and again: what ran there runs again, nothing alone."""
    lost: list[str] = []

    def says(device: Any, attempt: Any, log: list[Any]) -> list[tuple[float, Any]]:
        if len(lost) < 8 and device.place not in lost[4 * (len(lost) // 4) :]:
            lost.append(device.place)
            return [(0.0, ("begun", attempt.job.id)), (5.0, ("lost",)), (5.0, None)]
        return well(device, attempt, log)

    _, ended = supervised(tmp_path, says, devices=4, limit=1)
    assert sorted(e.id for e in ended) == [f"job_{i:03d}" for i in range(20)]
    assert {e.outcome for e in ended} == {"done"}
    assert [death["jobs"] for death in deaths(tmp_path)] == [[]] * 8


def test_a_job_that_takes_machines_with_it_is_given_up(tmp_path: Path) -> None:
    def says(device: Any, attempt: Any, log: list[Any]) -> list[tuple[float, Any]]:
        if attempt.job.id == "job_003":
            return [(0.0, ("begun", attempt.job.id)), (1.0, ("lost",)), (1.0, None)]
        return well(device, attempt, log)

    _, ended = supervised(tmp_path, says, devices=3)
    assert [e.id for e in ended if e.outcome == "failed"] == ["job_003"]
    assert len(ended) == 20
    assert len(deaths(tmp_path)) == LOSSES + 1


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"memory": 1e9} | resources}


def test_a_place_is_a_gpu_or_a_node() -> None:
    nodes = [node("a", CPU=8.0, GPU=2.0), node("b", CPU=4.0), node("c", alive=False, CPU=4.0), node("d")]
    gpu = Room(device="cuda:0", cpus=0, gpus=1, threads=4, node=None)
    assert rooms(nodes, accelerators=True) == [gpu, gpu]
    whole = [Room(device=None, cpus=n, gpus=0, threads=n, node=name) for name, n in (("a", 8), ("b", 4))]
    assert rooms(nodes, accelerators=False) == whole
    assert rooms(nodes[1:], accelerators=True) == whole[1:]
    assert [str(room) for room in (gpu, *whole)] == ["1 GPU", "8 CPUs", "4 CPUs"]
    assert rooms([node("d")], accelerators=True) == []


def test_without_ray_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def none(name: str, *args: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", none)
    with pytest.raises(ImportError, match=r'devices="ray" needs the package ray: pip install .*\[ray\]'):
        talk(turns=1).rollout(2, devices="ray", progress=False)


# -- on two nodes

SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""A dead node is noticed in seconds, not in a quarter of a minute."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each, to which nobody is connected yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        head = {"node_ip_address": "127.0.0.2", "include_dashboard": False, "_system_config": CHECKS}
        made = Cluster(initialize_head=True, head_node_args=SMALL | head)
        made.add_node(node_ip_address="127.0.0.3", **SMALL)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def clustered(conv: Conversation, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, **{"devices": "ray", "progress": False} | options)


def alone(conv: Conversation, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, progress=False, **options)


def plain(report: RunReport) -> dict[str, Any]:
    """All records, but for where they were made and how long that took."""
    records = {job: {k: v for k, v in r.items() if k != "device"} for job, r in essence(report).items()}
    for record in records.values():
        for message in record["transcript"]:
            message.get("metadata", {}).pop("seconds", None)
    return records


def places(report: RunReport) -> set[str]:
    return {str(r.device) for r in report.results.values()}


def deaths(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder) if event["event"] == "died"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], within: float = 30.0) -> None:
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.02)


def speakers(speak: Callable[[Any], str]) -> Conversation:
    return Conversation([FunctionParticipant(name, speak, version="1") for name in ("ada", "bob")])


def slow(seconds: float) -> Callable[[Any], str]:
    def speak(view: Any) -> str:
        time.sleep(seconds)
        return words(view)

    return speak


def troubled(number: int, trouble: Callable[[], Any], n: int = 12) -> Conversation:
    """Two who talk about n topics; at one of them something happens."""

    def speak(view: Any) -> str:
        if f"topic {number}." in view.messages[0]["content"]:
            trouble()
        return words(view)

    return about(speakers(speak).turns(2), n)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ray
def test_the_same_records_as_in_this_process(nodes: Any, tmp_path: Path) -> None:
    """Closures, a hook with state, an analyzer that asks; nothing stays behind."""
    import ray

    class Counting:
        """A hook that must not be shared: it edits by what it alone has seen."""

        def __init__(self) -> None:
            self.reviewed = 0

        def review(self, message: Any, conversation: Any) -> Any:
            self.reviewed += 1
            return interlens.edit(f"{message.content} {self.reviewed}")

    conv = about(speakers(slow(0.05)).turns(4), 30).set(message_hooks=Counting())
    conv = conv.analyzer(again=lambda c: c.sample("ada").content)
    here = alone(conv, seed=5)
    there = clustered(conv, seed=5, out_dir=tmp_path, max_batch_size=4)
    assert plain(there) == plain(here)
    assert list(there.results) == list(here.results)
    assert plain(RunReport.load(tmp_path, trust=True)) == plain(here)
    assert places(there) == {"ray#0", "ray#1"}
    assert not ray.is_initialized()
    where = conv.set(analyzers=()).analyzer(lambda c: (os.getpid(), os.environ["OMP_NUM_THREADS"]))
    found = [tuple(told) for told in clustered(where, 4).analyses().values()]
    assert {threads for _, threads in found} == {"1"}
    until(lambda: not any(alive(pid) for pid, _ in found), within=10)


@pytest.mark.ray
def test_a_connection_that_is_there_is_used_and_left(nodes: Any, tmp_path: Path) -> None:
    import ray

    ray.init(log_to_driver=False, logging_level=40)
    try:
        report = clustered(talk(turns=2).analyzer(lambda c: os.getpid()), 6, max_batch_size=1)
        assert ray.is_initialized()
        until(lambda: not any(alive(pid) for pid in set(report.analyses().values())), within=10)
        until(lambda: ray.available_resources().get("CPU") == 2, within=10)
    finally:
        ray.shutdown()


@pytest.mark.ray
def test_a_run_goes_on_here_and_there(nodes: Any, tmp_path: Path) -> None:
    """Begun in this process, gone on with in the cluster, ended here: what is logged is not asked again."""
    asked, run = tmp_path / "asked", tmp_path / "run"

    def speak(view: Any) -> str:
        with open(asked, "a") as file:
            file.write(f"{view.messages[0]['content'].split()[3][:-1]} turn/{len(view.messages) - 1}\n")
        time.sleep(0.01)
        return words(view)

    conv = about(speakers(speak).turns(4), 24)
    for devices, stop_after in ((None, 6), ("ray", 9), (None, 99)):
        known = {f"{job} {path}" for job, path in logged(run)} if run.exists() else set()
        asked.write_text("")
        told: list[Any] = []

        def watch(event: Any, told: list[Any] = told, stop_after: int = stop_after) -> None:
            told.append(event)
            if len(told) == stop_after:
                raise OSError("enough")

        with contextlib.suppress(OSError):
            report = alone(conv, devices=devices, out_dir=run, on_event=watch, max_batch_size=2)
        now = asked.read_text().split("\n")[:-1]
        assert len(now) >= 24
        assert len(now) == len(set(now))
        assert not known & set(now)
    assert report.complete
    said = [r.transcript for r in report.results.values()]
    assert said == [r.transcript for r in alone(conv).results.values()]
    assert {place[:4] for place in places(report)} == {"ray#", "defa"}


@pytest.mark.ray
def test_an_actor_killed_from_outside_is_replaced(nodes: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def speak(view: Any) -> str:
        if not pids.exists():
            pids.write_text(str(os.getpid()))
            time.sleep(60)
        return words(view)

    marks: list[float] = []

    def watch(event: Any) -> None:
        if event["kind"] == "job" and not marks:
            marks.append(time.monotonic())
            os.kill(int(pids.read_text()), signal.SIGKILL)
        if event["kind"] == "died":
            marks.append(time.monotonic())

    report = clustered(about(speakers(speak).turns(2), 12), out_dir=tmp_path / "run", on_event=watch)
    assert not report.failed
    assert len(report) == 12
    assert marks[1] - marks[0] < 5
    [death] = deaths(tmp_path / "run")
    assert "worker process has died" in death["why"]
    assert "actor_id" not in death["why"]


@pytest.mark.ray
def test_a_node_that_dies_takes_nothing_with_it_and_one_that_comes_is_used(
    nodes: Any, tmp_path: Path
) -> None:
    third = [nodes.add_node(node_ip_address="127.0.0.4", **SMALL)]
    ended: list[str] = []
    marks: dict[str, Any] = {}

    def watch(event: Any) -> None:
        if event["kind"] == "died":
            marks["told"], marks["at"] = time.monotonic(), len(ended)
            third.append(nodes.add_node(node_ip_address="127.0.0.4", **SMALL))
            return
        ended.append(event["id"])
        if len(ended) == 20:
            marks["killed"] = time.monotonic()
            nodes.remove_node(third[0], allow_graceful=False)

    conv = about(speakers(slow(0.1)).turns(4), 320)
    report = clustered(conv, out_dir=tmp_path, on_event=watch, max_batch_size=3)
    nodes.remove_node(third[1])
    assert not report.failed
    assert len(report) == 320
    assert plain(report) == plain(alone(about(speakers(words).turns(4), 320)))
    assert marks["told"] - marks["killed"] < 20
    [death] = deaths(tmp_path)
    assert "its node has died" in death["why"]
    assert death["jobs"] == []  # nobody is to blame, so nobody is run alone
    again = {job for job, r in report.results.items() if r.attempts > 1}
    assert 0 < len(again) <= 3
    late = {job for job, r in report.results.items() if r.device == death["place"]}
    assert late & set(ended[marks["at"] :]) - again, "the new node was given nothing"


@pytest.mark.ray
def test_a_poison_job_costs_two_actors_and_innocents_nothing(nodes: Any, tmp_path: Path) -> None:
    report = clustered(troubled(7, die, 20), out_dir=tmp_path, max_batch_size=10)
    assert report.failed == ["row_00007"]
    assert report["row_00007"].quarantined
    assert "worker process has died" in str(report["row_00007"].error)
    assert len(deaths(tmp_path)) == 2
    assert deaths(tmp_path)[1]["jobs"] == ["row_00007"]
    begun_twice = {job for job, r in report.results.items() if r.attempts > 1}
    assert begun_twice <= set(deaths(tmp_path)[0]["jobs"])


@pytest.mark.ray
def test_errors_and_results_of_any_class_come_back(nodes: Any, tmp_path: Path) -> None:
    class Local(Exception):
        def __init__(self, *, needed: str) -> None:
            super().__init__(needed)

    def odd(c: Conversation) -> Any:
        number = int(c.row["topic"].split()[1])
        if number == 1:
            raise Local(needed="text")
        return {2: threading.Lock(), 3: numpy.arange(3.0), 4: "x" * 5_000_000}.get(number, number)

    report = clustered(troubled(5, sys.exit, 8).analyzer(odd), out_dir=tmp_path)
    assert report.failed == ["row_00005"]
    assert "SystemExit" in str(report["row_00005"].error)
    assert "Local: text" in report["row_00001"].analysis_error
    assert "lock cannot be stored" in report["row_00002"].analysis_error
    assert report["row_00003"].analysis.tolist() == [0, 1, 2]
    assert len(report["row_00004"].analysis) == 5_000_000
    assert report["row_00006"].analysis == 6
    assert not deaths(tmp_path)


@pytest.mark.ray
def test_a_job_that_hangs_is_ended_with_its_stack(nodes: Any, tmp_path: Path) -> None:
    def hang_here() -> None:
        time.sleep(3600)

    report = clustered(troubled(3, hang_here, 6), out_dir=tmp_path, stall_timeout=2.5, max_batch_size=2)
    assert report.failed == ["row_00003"]
    assert "nothing moved" in str(report["row_00003"].error)
    assert "hang_here" in str(report["row_00003"].error)


def own_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("interlens-worker-*"))


@pytest.mark.ray
def test_captures_come_back_from_where_the_folder_is_not_seen(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies in between: what its successor reads of the log, it is sent."""
    mark, files, before = tmp_path / "mark", list[str](), set(own_folders())
    kept = Supervisor._on_file

    def on_file(self: Supervisor, worker: Any, name: str, data: bytes) -> None:
        files.append(name)
        kept(self, worker, name, data)

    def once(message: Any, conversation: Any) -> Any:
        if conversation.row["topic"] == "topic 1" and len(conversation.transcript) == 3 and not mark.exists():
            mark.touch()
            die()
        return interlens.approve()

    people = [AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=5) for n in ("ada", "bob")]
    conv = about(Conversation(people).turns(4), 4).hook(Capture(layers=(0, 1), reduce="mean"))
    monkeypatch.setattr(RunStore, "owner", property(lambda self: "a lock that is on no disk"))
    monkeypatch.setattr(Supervisor, "_on_file", on_file)
    there = clustered(conv.set(message_hooks=once), out_dir=tmp_path / "run")
    mark.touch()
    here = alone(conv.set(message_hooks=once))
    assert len(deaths(tmp_path / "run")) == 1
    assert there.transcripts().keys() == here.transcripts().keys()
    for job, transcript in there.transcripts().items():
        assert [m.content for m in transcript] == [m.content for m in here[job].transcript]
    for layer in (0, 1):
        one, two = (r.activations(site=f"resid_post.{layer}").tensor for r in (there, here))
        assert one.shape[0] == 16
        assert (one == two).all()
    assert sum(name.startswith("activations/") for name in files) == 4
    assert sum(name.startswith("turns/") for name in files) >= 16
    first = [name for name in files if "turn_0" in name]
    assert len(first) == 4  # no turn that was logged was taken again
    assert len(set(own_folders()) - before) <= 1  # only who was killed left what it was sent


@pytest.mark.ray
def test_workers_that_cannot_begin_end_the_run_with_their_own_words(nodes: Any, tmp_path: Path) -> None:
    def init() -> None:
        raise FileNotFoundError("the probe is not on this disk")

    analyzers._INITS.append(init)
    try:
        with pytest.raises(WorkerError, match="3 workers in a row") as error:
            clustered(talk(turns=1), 8, out_dir=tmp_path)
    finally:
        analyzers._INITS.remove(init)
    assert "the probe is not on this disk" in str(error.value)
    assert "Traceback" in str(error.value)


@pytest.mark.ray
def test_each_gpu_has_an_actor_that_sees_no_other(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine lacks is only claimed: Ray tells each actor which one is its own."""

    def seen(c: Conversation) -> list[str | None]:
        time.sleep(0.5)  # until the other one has begun
        return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]

    conv = talk(turns=1).analyzer(seen)
    extra = nodes.add_node(node_ip_address="127.0.0.5", **SMALL | {"num_gpus": 2, "num_cpus": 6})
    try:
        plainly = clustered(conv, 4, max_batch_size=1)
        monkeypatch.setattr(workers, "RayFleet", lambda **_: RayFleet(accelerators=True))
        with_models = clustered(conv, 16, max_batch_size=1)
    finally:
        nodes.remove_node(extra)
    assert {tuple(told) for told in with_models.analyses().values()} == {("0", "3"), ("1", "3")}
    assert places(with_models) == {"ray#0", "ray#1"}
    assert not {"0", "1"} & {told[0] for told in plainly.analyses().values()}


@pytest.mark.ray
def test_a_recipe_that_cannot_be_sent_leaves_no_connection(nodes: Any) -> None:
    import ray

    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent"):
        clustered(talk(turns=1).analyzer(lambda c: lock.locked()), 2)
    assert not ray.is_initialized()


@pytest.mark.ray
def test_a_cluster_without_room_is_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "nodes", lambda: [node("a")])
    with pytest.raises(WorkerError, match="neither; `ray status`"):
        RayFleet(accelerators=True)
    assert not ray.is_initialized()


PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    from interlens import Conversation, FunctionParticipant

    def speak(view):
        with open(sys.argv[1] + "-pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.1)
        return f"{len(view.messages)} said"

    people = [FunctionParticipant(name, speak, version="1") for name in "ab"]
    conv = Conversation(people, shared_context=lambda row: row["q"]).turns(4)
    conv = conv.data([{"q": f"question {i}"} for i in range(int(sys.argv[2]))])
    print(conv.rollout(out_dir=sys.argv[1], devices="ray", progress=False, max_batch_size=4))
    """
)


def program(folder: Path, n: int) -> "subprocess.Popen[str]":
    script = folder.with_name("script.py")
    script.write_text(PROGRAM.replace("sys.argv[1]", repr(str(folder))).replace("sys.argv[2]", str(n)))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def spoke(folder: Path) -> set[int]:
    path = Path(f"{folder}-pids")
    return {int(pid) for pid in path.read_text().split()} if path.exists() else set()


@pytest.mark.ray
def test_no_actor_outlives_its_driver_and_the_run_goes_on(nodes: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = program(folder, 60)
    until(lambda: len(spoke(folder)) == 2)
    child.kill()
    child.communicate()
    until(lambda: not any(alive(pid) for pid in spoke(folder)), within=15)
    child = program(folder, 60)
    until(lambda: len(spoke(folder)) > 2)
    time.sleep(1)
    os.killpg(child.pid, signal.SIGINT)  # the whole group, as a terminal and a notebook do
    out, err = child.communicate(timeout=30)
    assert Stopped.__name__ in err, (out, err)
    until(lambda: not any(alive(pid) for pid in spoke(folder)), within=15)
    out, err = program(folder, 60).communicate(timeout=60)
    assert "RunReport(60 jobs: 60 done" in out, err
