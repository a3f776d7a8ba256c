"""Which job a worker is given."""

from typing import Any

from interlens.request import BackendSpec
from interlens.runner.executor import Work
from interlens.runner.jobs import Attempt, Job
from interlens.runner.queue import Waiting

A, B, C = (BackendSpec(kind="huggingface", model=name) for name in "abc")


def work(lineup: int, number: int) -> Work:
    job = Job(id=f"{lineup}/{number}", seed=number, number=number, lineup=lineup)
    return Work(slot=number, attempt=Attempt(job=job), log=list)


def waiting(*needs: set[BackendSpec], n: int = 2) -> tuple[Waiting, list[str]]:
    pulled: list[str] = []

    def source(lineup: int) -> Any:
        for number in range(n):
            pulled.append(f"{lineup}/{number}")
            yield work(lineup, number)

    return Waiting([source(i) for i in range(len(needs))], [frozenset(need) for need in needs]), pulled


def given(queue: Waiting, has: Any, others: Any = ()) -> str | None:
    found = queue.next_for(has, [has, *others])
    return found.attempt.job.id if found is not None else None


def test_in_order_where_models_do_not_matter() -> None:
    queue, pulled = waiting(set(), set())
    assert [given(queue, set()) for _ in range(5)] == ["0/0", "0/1", "1/0", "1/1", None]
    assert queue.empty()
    assert pulled == ["0/0", "1/0", "0/1", "1/1"]


def test_where_the_models_are_already() -> None:
    queue, _ = waiting({A}, {B}, {A, B})
    assert given(queue, {B}) == "1/0"
    assert given(queue, {A}) == "0/0"
    assert given(queue, {A, B}) == "0/1"
    assert [given(queue, {B}) for _ in range(4)] == ["1/1", "2/0", "2/1", None]  # rather than idle


def test_two_new_workers_begin_with_different_models() -> None:
    queue, _ = waiting({A}, {B}, n=9)
    assert given(queue, set(), [set()]) == "0/0"
    assert given(queue, set(), [{A}]) == "1/0"


def test_at_most_one_of_each_lineup_is_pulled_ahead() -> None:
    queue, pulled = waiting({A}, {B}, n=50)
    for _ in range(10):
        given(queue, {A})
    assert len([p for p in pulled if p.startswith("1/")]) == 1
    assert len(pulled) <= 12


def test_what_comes_back_is_next() -> None:
    queue, _ = waiting({A})
    given(queue, {A})
    queue.back(work(0, 0))
    assert not queue.empty()
    assert given(queue, set()) == "0/0"


def test_a_lineup_is_over_once() -> None:
    queue, _ = waiting({A}, {A, B}, {C}, n=1)
    for _ in range(2):
        given(queue, {A, B})
    assert queue.newly_over({0}) == []  # its end is not seen before somebody asks
    assert not queue.empty()
    assert queue.newly_over({0}) == [1]
    assert queue.needed() == {A, C}
    assert queue.newly_over(set()) == [0]
    assert queue.newly_over(set()) == []
    assert queue.needed() == {C}
