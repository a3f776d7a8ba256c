import time
from typing import Any

import pytest

from interlens.backends.scripted import ScriptedBackend, VirtualClock
from interlens.errors import ParticipantError
from interlens.request import Completion, Forward
from tests.runner.talk import echo, request


def drain(backend: ScriptedBackend) -> list[Completion]:
    """Everything in flight, as the scheduler would get it."""
    out = []
    while backend.next_due is not None:
        out += backend.step()
        backend.idle()
    return out


def test_a_list_is_answered_in_the_order_asked() -> None:
    boom = ValueError("boom")
    backend = ScriptedBackend(["one", Completion(text="two", finish="refusal"), boom])
    tickets = [backend.submit(request(backend)) for _ in range(4)]
    done = backend.step()
    assert [d.ticket for d in done] == tickets
    assert [d.text for d in done] == ["one", "two", "", ""]
    assert [d.finish for d in done] == ["eos", "refusal", "error", "error"]
    assert done[2].error is boom
    assert isinstance(done[3].error, ParticipantError)
    assert "3 replies" in str(done[3].error)


@pytest.mark.parametrize(
    ("text", "rest", "said", "finish", "n"),
    [
        ("a b c", {}, "a b c", "eos", 4),
        ("a b c", {"max_new_tokens": 4}, "a b c", "eos", 4),
        ("a b c", {"max_new_tokens": 3}, "a b c", "length", 3),
        ("a b c", {"max_new_tokens": 1}, "a", "length", 1),
        ("", {}, "", "eos", 1),
        ("", {"max_new_tokens": 1}, "", "eos", 1),
        ("a b STOP c", {"stop": ("STOP",)}, "a b ", "stop", 4),
        ("a END STOP", {"stop": ("STOP", "END")}, "a ", "stop", 3),
        ("a b c", {"prefill": "so: "}, "a b c", "eos", 4),
    ],
)
def test_words_are_tokens(text: str, rest: dict[str, Any], said: str, finish: str, n: int) -> None:
    backend = ScriptedBackend([text])
    backend.submit(request(backend, **rest))
    [done] = backend.step()
    assert (done.text, done.finish, done.n_tokens) == (said, finish, n)


def test_what_it_cannot_do_is_refused() -> None:
    backend = ScriptedBackend(["a"])
    prompt = request(backend).prompt
    plan = type("Plan", (), {"digest": lambda self: ""})()
    for asked in (
        Forward(backend=backend, prompt=prompt),
        request(backend, logprobs=0),
        request(backend, plan=plan),
        request(backend, prefill=(1, 2)),
    ):
        with pytest.raises(ValueError, match="scripted"):
            backend.submit(asked)
    assert backend.requests == []
    assert backend.live == 0


def test_virtual_time_goes_from_reply_to_reply() -> None:
    clock = VirtualClock()
    backend = echo(clock, latency=lambda r: float(len(r.prompt.messages[0]["content"])))
    for text in ("four", "a", "six___", "bb"):
        backend.submit(request(backend, text))
    seen = []
    while backend.next_due is not None:
        seen += [(clock.now, d.text) for d in backend.step()]
        backend.idle()
    assert seen == [(1, "a"), (2, "bb"), (4, "four"), (6, "six___")]
    assert backend.most_live == 4
    assert backend.live == 0


def test_backends_with_one_clock_wait_for_each_other() -> None:
    """`idle` of one of them must not jump over a reply of the other."""
    clock = VirtualClock()
    slow, quick = echo(clock, 10.0), echo(clock, 4.0)
    slow.submit(request(slow))
    quick.submit(request(quick))
    for backend in (slow, quick):
        backend.idle()
    assert clock.now == 4
    assert len(quick.step()) == 1
    for backend in (slow, quick):
        backend.idle()
    assert clock.now == 10
    assert len(slow.step()) == 1


def test_time_does_not_go_back() -> None:
    clock = VirtualClock()
    backend = echo(clock, 3.0)
    backend.submit(request(backend))
    clock.now = 5.0
    backend.idle()
    assert clock.now == 5
    assert len(backend.step()) == 1


def test_real_time() -> None:
    backend = echo(latency=0.05)
    began = time.monotonic()
    backend.submit(request(backend))
    assert backend.step() == []
    done = backend.step(5.0)
    done = done or backend.step(5.0)
    assert [d.text for d in done] == ["hello"]
    assert time.monotonic() - began >= 0.05


def test_one_completion_follows_a_cancel() -> None:
    clock = VirtualClock()
    backend = echo(clock, 100.0)
    first, second = (backend.submit(request(backend, text)) for text in ("a", "b"))
    backend.cancel(second)
    [done] = backend.step()
    assert (done.ticket, done.finish, done.text, clock.now) == (second, "cancelled", "", 0)
    backend.cancel(second)
    assert [(d.ticket, d.text) for d in drain(backend)] == [(first, "a")]


def test_text_comes_as_a_delta_and_close_forgets() -> None:
    backend, told = echo(VirtualClock(), 3.0), []
    backend.submit(request(backend, "hello there"), told.append)
    assert "".join(told) == "hello there"
    backend.close()
    assert drain(backend) == []
    assert backend.live == 0
