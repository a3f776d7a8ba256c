"""The scheduler on scripted backends: order, makespan, nesting, cancelling, faults."""

import gc
import heapq
import itertools
import logging
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest

from interlens.backends.scripted import ScriptedBackend, VirtualClock
from interlens.errors import Cancelled
from interlens.request import BackendSpec, Call, Completion, Generate, Ticket
from interlens.runner.log import Log
from interlens.runner.scheduler import Scheduler, Task
from interlens.runner.scheduler import scheduler as of_this_process
from interlens.runner.tasks import Event, Run
from tests.runner.talk import asking, echo, request, until


@pytest.fixture
def sched() -> Iterator[Scheduler]:
    own = Scheduler()
    yield own
    own.shutdown()
    assert not own._running.locked()


def outcomes(sched: Scheduler, tasks: Iterable[Task], **how: Any) -> dict[str, Any]:
    """What each task returned or raised, in the order in which they ended."""
    return {e.task: e.error or e.value for e in sched.start(tasks, **how).events()}


def called(fn: Callable[..., Any], path: str = "call") -> Any:
    """A program of one call."""
    return (yield Call(fn=fn, path=path))


# -- order and time


def list_schedule(durations: list[list[int]], machines: int) -> int:
    """Reference: each job in its turn starts on the machine that is free first; when the last one ends."""
    free = [0] * machines
    for steps in durations:
        heapq.heappush(free, heapq.heappop(free) + sum(steps))
    return max(free)


@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_a_slow_request_delays_its_own_job_only(sched: Scheduler, limit: int) -> None:
    rng = random.Random(limit)
    # One job is much slower than all others.
    durations = [[rng.randrange(1, 50) for _ in range(rng.randrange(1, 6))] for _ in range(40)]
    durations[7] = [5000]
    clock = VirtualClock()
    backend = echo(clock, latency=lambda r: durations[int(r.prompt.messages[0]["content"])][int(r.path[5:])])
    tasks = [Task(str(j), asking(backend, [str(j)] * len(steps))) for j, steps in enumerate(durations)]
    done = outcomes(sched, tasks, limit=limit)
    assert clock.now == list_schedule(durations, limit)
    assert done == {str(j): [str(j)] * len(steps) for j, steps in enumerate(durations)}
    assert backend.most_live == min(limit, 40)
    if limit >= 40:
        assert list(done)[-1] == "7"


def test_jobs_are_pulled_lazily(sched: Scheduler) -> None:
    pulled: list[int] = []
    backend = echo(VirtualClock(), 1.0)

    def source() -> Iterator[Task]:
        for j in range(100):
            pulled.append(j)
            yield Task(str(j), asking(backend, ["x", "y"]))

    first = None
    run = sched.start(source(), limit=8)
    for event in run.events():
        first = first if first is not None else len(pulled)
        assert event.kind == "done"
    assert len(pulled) == 100
    assert backend.most_live == 8


@pytest.mark.parametrize("seed", range(5))
def test_several_requests_come_back_in_the_order_asked(sched: Scheduler, seed: int) -> None:
    rng = random.Random(seed)
    backend = echo(VirtualClock(), latency=lambda r: rng.randrange(100))

    def program() -> Any:
        texts = [str(i) for i in range(20)]
        mixed = yield [
            request(backend, t, f"a/{t}") if i % 3 else Call(fn=str, args=(t,), path=f"a/{t}")
            for i, t in enumerate(texts)
        ]
        nothing = yield []
        one = yield [request(backend, "one", "b")]
        return [getattr(r, "text", r) for r in mixed], nothing, [r.text for r in one]

    assert outcomes(sched, [Task("x", program())]) == {"x": ([str(i) for i in range(20)], [], ["one"])}


def test_a_failure_among_several_waits_for_the_others_and_is_the_first(sched: Scheduler) -> None:
    clock = VirtualClock()
    backend = ScriptedBackend(
        lambda r: KeyError(r.path) if r.path in "bd" else r.path, clock=clock, latency=lambda r: ord(r.path)
    )

    def program() -> Any:
        try:
            yield [request(backend, path=p) for p in "abcd"]
        except KeyError as error:
            again = yield request(backend, path="e")
            return error.args[0], again.text, clock.now

    assert outcomes(sched, [Task("x", program())]) == {"x": ("b", "e", ord("d") + ord("e"))}


def test_what_is_no_request_is_an_error_in_the_program(sched: Scheduler) -> None:
    def program() -> Any:
        with pytest.raises(AttributeError):
            yield "hello"
        return "went on"

    assert outcomes(sched, [Task("x", program())]) == {"x": "went on"}


def test_a_failing_source_ends_the_run_told_why(sched: Scheduler) -> None:
    cancelled: list[str] = []

    def program() -> Any:
        try:
            yield request(echo(VirtualClock(), 1e9))
        except Cancelled:
            cancelled.append("yes")
            raise

    def source() -> Iterator[Task]:
        yield Task("0", program())
        raise ValueError("row 1 is bad")

    with pytest.raises(ValueError, match="row 1 is bad"):
        outcomes(sched, source())
    assert cancelled == ["yes"]


# -- calls and nested asks


def test_calls_block_nobody(sched: Scheduler) -> None:
    """Twenty calls that wait for each other can only end if all of them run at once."""
    barrier = threading.Barrier(20, timeout=10)
    tasks = [Task(str(i), called(barrier.wait)) for i in range(20)]
    assert sorted(outcomes(sched, tasks).values()) == list(range(20))
    assert sched.threads.made == 20
    assert len(outcomes(sched, [Task(str(i), called(barrier.wait)) for i in range(20)])) == 20
    assert sched.threads.made == 20


def test_nested_asks_are_batched_and_logged_with_their_call(sched: Scheduler) -> None:
    clock = VirtualClock()
    backend, judge = echo(clock, 2.0), echo(clock, 3.0)
    entries: list[dict[str, Any]] = []

    def ask_judge() -> str:
        return "+".join(sched.ask(asking(judge, ["one", "two"]))) + sched.ask(asking(judge, ["x"]))[0]

    def program() -> Any:
        yield request(backend, path="turn/0")
        return (yield Call(fn=ask_judge, path="turn/0/hook/0"))

    logs = [Log(sink=lambda e, c: entries.append(e)) for _ in range(10)]
    done = outcomes(sched, [Task(str(i), program(), log) for i, log in enumerate(logs)])
    assert set(done.values()) == {"one+twox"}
    assert judge.most_live == 10
    assert clock.now == 2 + 3 * 3
    inner = ["0/turn/0", "0/turn/1", "1/turn/0"]
    paths = ["turn/0", *(f"turn/0/hook/0/{p}" for p in inner), "turn/0/hook/0"]
    assert sorted(e["path"] for e in entries) == sorted(paths * 10)


def test_a_nested_ask_goes_before_jobs_that_began_later(sched: Scheduler) -> None:
    """A local backend is told whose turn it is: the order in which jobs began."""
    told: list[tuple[str, int]] = []

    class Local(ScriptedBackend):
        local = True

        def submit(self, asked: Any, on_delta: Any = None, priority: int = 0) -> Ticket:
            told.append((asked.prompt.messages[0]["content"], priority))
            return super().submit(asked, on_delta)

    backend = Local(lambda r: "x")
    gate = threading.Barrier(3, timeout=10)

    def nested(name: str) -> None:
        gate.wait()
        sched.ask(asking(backend, [name]))

    tasks = [Task(str(i), called(lambda i=i: nested(str(i)))) for i in range(3)]  # type: ignore[misc]
    outcomes(sched, tasks)
    numbers = dict(told)
    assert numbers["0"] < numbers["1"] < numbers["2"]


def test_asks_nest_to_any_depth(sched: Scheduler) -> None:
    backend = echo(VirtualClock(), 1.0)

    def deep(level: int) -> Any:
        reply = yield request(backend, str(level), "r")
        below = "" if level == 5 else (yield Call(fn=lambda: sched.ask(deep(level + 1)), path="c"))
        return reply.text + below

    paths: list[str] = []
    log = Log(sink=lambda e, c: paths.append(e["path"]))
    assert outcomes(sched, [Task("x", deep(0), log)]) == {"x": "012345"}
    assert paths[:3] == ["r", "c/0/r", "c/0/c/0/r"]
    assert sched.ask(deep(0)) == "012345"


def test_two_hundred_that_all_ask_at_once_do_not_deadlock(sched: Scheduler) -> None:
    backend = echo(VirtualClock(), 1.0)
    gate = threading.Barrier(200, timeout=20)

    def sample() -> str:
        gate.wait()
        return sched.ask(asking(backend, ["a", "b"]))[1]

    done = outcomes(sched, [Task(str(i), called(sample)) for i in range(200)], limit=200)
    assert list(done.values()) == ["b"] * 200
    assert backend.most_live == 200


def test_live_calls_run_on_the_callers_own_thread(sched: Scheduler) -> None:
    """So that input(), a debugger and Ctrl-C work in them; also in nested ones."""
    here = threading.current_thread()

    def inside() -> list[threading.Thread]:
        return [threading.current_thread(), sched.ask(called(threading.current_thread))]

    assert sched.ask(called(inside)) == [here, here]
    [threads] = outcomes(sched, [Task("x", called(inside))]).values()
    assert threads[0] is threads[1] is not here


def test_a_verb_in_the_schedulers_own_thread_is_refused_with_a_sentence(sched: Scheduler) -> None:
    backend = ScriptedBackend(lambda r: str(sched.ask(asking(echo(), ["x"]))))
    [error] = outcomes(sched, [Task("x", asking(backend, ["a"]))]).values()
    assert isinstance(error, RuntimeError)
    assert "scheduler's own thread" in str(error)
    assert sched.ask(asking(echo(), ["works"])) == ["works"]


def test_two_threads_at_once(sched: Scheduler) -> None:
    backend = echo(latency=0.002)
    found: dict[int, Any] = {}

    def user(k: int) -> None:
        tasks = [Task(str(i), asking(backend, [f"{k}.{i}.{t}" for t in range(3)])) for i in range(20)]
        found[k] = outcomes(sched, tasks, limit=4)

    users = [threading.Thread(target=user, args=(k,)) for k in range(4)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(20)
    assert found == {k: {str(i): [f"{k}.{i}.{t}" for t in range(3)] for i in range(20)} for k in range(4)}
    assert 4 < backend.most_live <= 16


def test_a_call_that_returns_an_odd_thing(sched: Scheduler) -> None:
    assert sched.ask(called(lambda: None)) is None
    with pytest.raises(SystemExit):
        sched.ask(called(lambda: exec("raise SystemExit(3)")))
    [error] = outcomes(sched, [Task("x", called(lambda: exec("raise SystemExit(3)")))]).values()
    assert isinstance(error, SystemExit)


# -- leaving early


class Watched(ScriptedBackend):
    """Records what is cancelled."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(lambda r: r.prompt.messages[-1]["content"], **rest)
        self.cancelled: list[int] = []

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket.number)
        super().cancel(ticket)


def test_leaving_cancels_programs_and_requests(sched: Scheduler) -> None:
    backend = Watched(latency=60.0)
    thrown: list[str] = []

    def program(name: str) -> Any:
        try:
            yield [request(backend, path="a"), request(backend, path="b")]
        except Cancelled:
            thrown.append(name)
            yield request(backend, path="after")  # a program may end as it likes

    events = sched.start(
        [Task("quick", asking(echo(), ["x"])), *(Task(n, program(n)) for n in "ab")]
    ).events()
    assert next(events).task == "quick"
    events.close()
    assert sorted(thrown) == ["a", "b"]
    assert sorted(backend.cancelled) == [0, 1, 2, 3]
    until(lambda: backend.live == 0)
    assert sched.call(lambda: (sched._runs, sched._asked, sched._busy, sched._calls)) == ([], {}, {}, set())


def test_a_running_call_is_abandoned_and_holds_up_nobody(sched: Scheduler) -> None:
    release, begun = threading.Event(), threading.Event()
    ran_on: list[str] = []

    def stuck() -> None:
        begun.set()
        release.wait(30)
        ran_on.append("yes")

    def program() -> Any:
        yield Call(fn=stuck, path="c")
        ran_on.append("never")

    events = sched.start([Task("quick", asking(echo(), ["x"])), Task("stuck", program())]).events()
    next(events)
    assert begun.wait(10)
    events.close()
    # A backend that waits until nobody else can ask is not kept waiting by a call that nobody waits for.
    assert sched.ask(asking(echo(VirtualClock(), 5.0), ["a", "b"])) == ["a", "b"]
    assert ran_on == []
    release.set()
    until(lambda: bool(ran_on))
    sched.call(lambda: None)
    assert ran_on == ["yes"]


def test_what_an_abandoned_call_asks_is_cancelled_too(sched: Scheduler) -> None:
    backend = Watched(latency=60.0)
    ended: list[BaseException] = []

    def hook() -> None:
        for text in ("first", "second"):
            try:
                sched.ask(asking(backend, [text]))
            except BaseException as error:
                ended.append(error)

    events = sched.start([Task("quick", asking(echo(), ["x"])), Task("x", called(hook))]).events()
    next(events)
    until(lambda: backend.live == 1)
    events.close()
    until(lambda: len(ended) == 2)
    assert all(isinstance(e, Cancelled) for e in ended)
    assert [r.prompt.messages[0]["content"] for r in backend.requests] == ["first"]
    until(lambda: backend.live == 0)


def test_a_reader_that_fails_cancels_the_run(sched: Scheduler) -> None:
    """The run ends when the loop over its events is left by an error, not when its frame is collected."""
    backend = Watched(latency=60.0)
    backend.script = lambda r: r.path

    def on_delta(speaker: str, path: str, text: str) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="terminal") as kept:
        sched.ask(asking(backend, ["x", "y"]), on_delta=on_delta)
    assert backend.cancelled == [0]
    assert kept.traceback


def test_a_forgotten_run_is_cancelled_by_the_collector(sched: Scheduler) -> None:
    backend = Watched(latency=60.0)
    events = sched.start([Task("quick", asking(echo(), ["x"])), Task("x", asking(backend, ["a"]))]).events()
    next(events)
    circle: list[Any] = [events]
    circle.append(circle)
    del events, circle
    sched.call(gc.collect)  # in the scheduler's own thread, which must not wait for itself
    until(lambda: backend.live == 0)
    assert backend.cancelled == [0]


def test_cancelling_twice_or_late_does_nothing(sched: Scheduler) -> None:
    run = sched.start([Task("x", asking(echo(), ["x"]))])
    assert [e.kind for e in run.events()] == ["done"]
    for _ in range(2):
        sched.call(lambda: sched.cancel(run))
    assert sched.ask(asking(echo(), ["works"])) == ["works"]


@pytest.mark.parametrize("last", [True, False])
def test_what_is_done_but_to_keep_it_is_kept_while_a_run_ends(sched: Scheduler, last: bool) -> None:
    """The last turn ends after the run was asked to end: its record is written and told."""
    begun, go, kept = threading.Event(), threading.Event(), []

    def turn() -> None:
        begun.set()
        assert go.wait(20)

    def program() -> Generator[Any, Any, str]:
        yield Call(fn=turn, path="turn")
        yield Call(fn=kept.append, args=(1,), path="record", last=last)
        return "kept"

    run = sched.start([Task("x", program())])
    run.begin()
    assert begun.wait(20)
    sched.drain(run, 20.0)
    sched.call(lambda: None)  # the drain has been heard
    go.set()
    assert [e.value for e in run.events()] == (["kept"] if last else [])
    assert kept == ([1] if last else [])


# -- deltas


class Chatty:
    """Gives its reply as many pieces of one letter."""

    name, local = "chatty", False

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.told = threading.Event()
        self.numbers = itertools.count()

    def submit(self, asked: Generate, on_delta: Callable[[str], None] | None = None) -> Ticket:
        self.on_delta, self.ticket = on_delta, Ticket(next(self.numbers))
        return self.ticket

    def step(self, timeout: float = 0) -> list[Completion]:
        if self.on_delta is not None:
            for i in range(self.pieces):
                self.on_delta("abcdefghij"[i % 10])
        self.told.set()
        return [Completion(ticket=self.ticket, text="done")]

    def idle(self) -> None: ...
    def cancel(self, ticket: Ticket) -> None: ...


def test_a_slow_reader_costs_no_memory(sched: Scheduler) -> None:
    pieces = 200_000
    backend: Any = Chatty(pieces)
    run = sched.start([Task("x", asking(backend, ["x"]))], stream=True)
    run.begin()
    assert backend.told.wait(20)
    until(lambda: run._told.qsize() >= 3)
    assert run._told.qsize() == 3  # all text so far, done, end
    assert sum(map(len, run._text.values())) <= 1025
    events = list(run.events())
    assert [e.kind for e in events] == ["delta", "done"]
    assert events[0].value == "abcdefghij" * (pieces // 10)


def test_nobody_who_did_not_ask_for_text_is_told_any(sched: Scheduler) -> None:
    backend: Any = Chatty(3)
    assert [e.kind for e in sched.start([Task("x", asking(backend, ["x"]))]).events()] == ["done"]


@pytest.mark.parametrize("seed", range(3))
def test_text_of_two_speakers_stays_whole_at_any_speed(seed: int) -> None:
    """A writer and a reader race; nothing is lost, doubled or given to another."""
    rng = random.Random(seed)
    quiet = {"begin": lambda run: None, "stop": lambda run: queue.SimpleQueue()}
    run = Run(iter(()), 1, inline=True, stream=True, **quiet)
    pieces = [(rng.choice("ab"), str(i)) for i in range(5000)]

    def write() -> None:
        for task, text in pieces:
            run.tell(Event("delta", task, text + " "))
        run.tell(Event("end"))

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        got = {"a": "", "b": ""}
        for event in run.events():
            got[event.task] += event.value
        writer.join()
    finally:
        sys.setswitchinterval(interval)
    assert got == {name: "".join(f"{t} " for task, t in pieces if task == name) for name in "ab"}


# -- faults


class Broken(ScriptedBackend):
    """Raises in one of its methods, once or several times, while more than one request is in flight."""

    def __init__(self, where: str, times: int = 1, **rest: Any) -> None:
        super().__init__(lambda r: r.prompt.messages[-1]["content"], **rest)
        self.where, self.left = where, times

    def _trip(self, where: str) -> None:
        if where == self.where and self.left and self.live > 1:
            self.left -= 1
            raise OSError(f"{where} broke")

    def step(self, timeout: float = 0) -> list[Completion]:
        self._trip("step")
        return super().step(timeout)

    def idle(self) -> None:
        self._trip("idle")
        super().idle()

    def cancel(self, ticket: Ticket) -> None:
        self._trip("cancel")
        super().cancel(ticket)


@pytest.mark.parametrize("where", ["step", "idle"])
def test_a_backend_that_breaks_fails_those_who_wait_for_it_alone(sched: Scheduler, where: str) -> None:
    clock = VirtualClock()
    broken, sound = Broken(where, clock=clock, latency=2.0), echo(clock, 1.0)
    tasks = [Task(f"broken {i}", asking(broken, ["x"])) for i in range(3)]
    tasks += [Task(f"sound {i}", asking(sound, ["x", "y", "z"])) for i in range(3)]
    done = outcomes(sched, tasks)
    assert {name for name, value in done.items() if isinstance(value, OSError)} == {
        f"broken {i}" for i in range(3)
    }
    assert [done[f"sound {i}"] for i in range(3)] == [["x", "y", "z"]] * 3
    # The same backend goes on working: what it still finishes of before is nobody's, and misleads nobody.
    assert outcomes(sched, [Task(str(i), asking(broken, [f"{i}", "b"])) for i in range(3)]) == {
        str(i): [f"{i}", "b"] for i in range(3)
    }
    assert sched.call(lambda: (sched._asked, sched._busy)) == ({}, {})


def test_what_a_broken_backend_still_finishes_misleads_nobody(sched: Scheduler) -> None:
    """It breaks again when it is asked to tidy up; what it gives later belongs to nobody."""
    backend = Broken("step", times=2)
    failed = outcomes(sched, [Task(str(i), asking(backend, [f"old {i}"])) for i in range(3)])
    assert [type(e) for e in failed.values()] == [OSError] * 3
    assert backend.live == 3
    for text in ("a", "b"):
        assert sched.ask(asking(backend, [text, text + text])) == [text, text + text]
    assert sched.call(lambda: (sched._asked, sched._busy)) == ({}, {})


def test_a_backend_that_cannot_cancel(sched: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    backend = Broken("cancel", latency=0.05)
    events = sched.start(
        [Task("quick", asking(echo(), ["x"])), *(Task(str(i), asking(backend, ["a"])) for i in range(2))]
    )
    following = events.events()
    next(following)
    following.close()
    until(lambda: backend.live == 0)
    assert sched.ask(asking(echo(), ["works"])) == ["works"]
    assert not caplog.records


def test_a_request_that_is_refused_fails_its_own_job(sched: Scheduler) -> None:
    backend = echo()

    def program() -> Any:
        yield [request(backend, "a", "a"), request(backend, "b", "b", logprobs=1)]

    done = outcomes(sched, [Task("bad", program()), Task("good", asking(backend, ["x"]))])
    assert isinstance(done["bad"], ValueError)
    assert done["good"] == ["x"]


def test_a_backend_nobody_knows(sched: Scheduler) -> None:
    spec: Any = BackendSpec(kind="telepathy", model="m")
    with pytest.raises(ValueError, match='no backend "telepathy"'):
        sched.ask(asking(spec, ["x"]))


def test_the_loop_outlives_a_fault_in_a_piece_of_work(
    sched: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "interlens.runner"):
        sched.post(lambda: exec("raise KeyError('odd')"))
        assert sched.ask(asking(echo(), ["works"])) == ["works"]
    assert "odd" in caplog.text
    with pytest.raises(KeyError, match="even"):
        sched.call(lambda: exec("raise KeyError('even')"))


def test_a_model_that_is_answering_cannot_be_freed(sched: Scheduler) -> None:
    backend, spec = echo(latency=60.0), BackendSpec(kind="huggingface", model="m")
    sched.call(lambda: sched.pool._resident.update({spec: backend}))
    events = sched.start([Task("quick", asking(echo(), ["x"])), Task("x", asking(spec, ["a"]))]).events()
    next(events)
    with pytest.raises(RuntimeError, match="answers 1 request"):
        sched.call(sched.pool.unload)
    events.close()
    until(lambda: backend.live == 0)
    assert sched.call(lambda: sched.pool.peek(spec)) is backend
    assert sched.call(lambda: (sched.pool.unload(spec), sched.pool.unload())) == (["scripted"], [])
    assert sched.call(lambda: sched.pool.peek(spec)) is None


def test_after_the_end_a_verb_says_so() -> None:
    own = Scheduler()
    assert own.ask(asking(echo(), ["x"])) == ["x"]
    own.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        own.ask(asking(echo(), ["x"]))


def test_ctrl_c_at_any_moment_leaves_one_loop_that_answers(sched: Scheduler) -> None:
    """A second loop on the same tasks would advance them twice, and lose some."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def loops() -> int:
        return len([t for t in threading.enumerate() if t.name == "interlens-scheduler"])

    sched.call(lambda: None)
    before, rng, hits = loops(), random.Random(0), 0
    earlier = signal.signal(signal.SIGALRM, interrupt)
    end = time.monotonic() + 3
    try:
        while hits < 20_000 and time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-4))
                while True:
                    sched.post(list)
            except KeyboardInterrupt:
                hits += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    assert hits > 1000
    assert sched.ask(asking(echo(), ["x", "y"])) == ["x", "y"]
    assert loops() == before


def test_there_is_one_of_this_process() -> None:
    assert of_this_process() is of_this_process()
    assert of_this_process().ask(asking(echo(), ["x"])) == ["x"]
    names = [t.name for t in threading.enumerate()]
    assert names.count("interlens-scheduler") == 1


def test_idle_costs_nothing(sched: Scheduler) -> None:
    """Parked when nothing is to be done."""
    sched.ask(asking(echo(), ["x"]))
    turns: list[int] = []
    pull = sched._pull
    sched._pull = lambda: bool(turns.append(1)) or pull()  # type: ignore[method-assign]
    sched.call(lambda: None)
    time.sleep(0.2)
    assert len(turns) <= 3
