"""A job's log: what is kept, what is handed back, what is refused."""

import json
import math
from typing import Any

import pytest

from interlens.errors import RecipeChanged
from interlens.request import Call, Completion, Forward, SamplingParams
from interlens.runner.log import Entry, Log, ScopedLog
from interlens.seeds import Stream
from tests.runner.talk import echo, request

BACKEND = echo()


class Disk:
    """A sink that passes every entry through a strict JSON file, as the store does."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, entry: Entry, completion: Completion | None) -> None:
        self.lines.append(json.dumps(entry, allow_nan=False))

    @property
    def entries(self) -> list[Entry]:
        return [json.loads(line) for line in self.lines]


def call(path: str = "c", **rest: Any) -> Call:
    return Call(fn=len, path=path, **rest)


def test_what_was_recorded_is_recalled() -> None:
    disk = Disk()
    done = Completion(text="a\u2028b", logprobs=(-math.inf, math.nan), token_ids=(1, 2), n_tokens=2)
    first = Log(sink=disk.put)
    for asked, value in ((request(BACKEND), done), (call(), {"x": [math.nan, -math.inf, "\x85"]})):
        assert first.recall(asked) == (False, None)
        first.record(asked, value)
    again = Log(disk.entries)
    known, back = again.recall(request(BACKEND))
    assert known
    assert repr(back) == repr(done)
    known, back = again.recall(call())
    assert repr(back) == repr({"x": [math.nan, -math.inf, "\x85"]})


def test_without_a_sink_nothing_is_kept() -> None:
    log = Log()
    log.recall(call())
    log.record(call(), object())
    assert log.entries == {}


def test_pack_and_unpack() -> None:
    disk, odd = Disk(), Call(fn=len, path="c", pack=lambda s: sorted(s), unpack=set)
    Log(sink=disk.put).record(odd, {3, 1, 2})
    assert disk.entries[0]["value"] == [1, 2, 3]
    assert Log(disk.entries).recall(odd) == (True, {1, 2, 3})


def test_pure_calls_run_again() -> None:
    disk, pure = Disk(), call(replay="again")
    Log(sink=disk.put).record(pure, 1)
    assert disk.lines == []
    Log(sink=disk.put).record(call(), 1)
    assert Log(disk.entries).recall(pure) == (False, None)


def test_a_pass_that_gave_logits_is_made_again() -> None:
    """Its logits are not in the log, and half a result would be worse than none."""
    disk, asked = Disk(), Forward(backend=BACKEND, prompt=request(BACKEND).prompt, path="f", logits=True)
    log = Log(sink=disk.put)
    log.record(asked, Completion(logits=object()))
    assert disk.lines == []
    log.record(asked, Completion(n_prompt_tokens=3))
    assert Log(disk.entries).recall(asked) == (True, Completion(n_prompt_tokens=3))


def test_one_path_is_asked_once() -> None:
    log = Log()
    log.recall(request(BACKEND))
    with pytest.raises(RuntimeError, match="twice under the path 'turn/0'"):
        log.recall(request(BACKEND))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": "other"}, "another prompt"),
        ({"stream": Stream(job=9)}, "another seed"),
        ({"sampling": SamplingParams(temperature=0)}, "another sampling"),
        ({"max_new_tokens": 5, "stop": ("x",)}, "another max_new_tokens, stop"),
    ],
)
def test_another_request_at_a_logged_path_is_refused_by_field(change: dict[str, Any], named: str) -> None:
    disk = Disk()
    Log(sink=disk.put).record(request(BACKEND), Completion(text="a"))
    with pytest.raises(RecipeChanged, match=f"row_7 cannot go on: at turn/0 the log holds {named} than"):
        Log(disk.entries, label="row_7").recall(request(BACKEND, **change))


def test_another_function_at_a_logged_path_is_refused() -> None:
    disk = Disk()
    Log(sink=disk.put).record(call(version="1"), 3)
    with pytest.raises(RecipeChanged, match="another function"):
        Log(disk.entries).recall(call(version="2"))
    with pytest.raises(RecipeChanged):
        Log(disk.entries).recall(request(BACKEND, path="c"))


def test_what_is_no_json_is_refused_with_its_path() -> None:
    disk = Disk()
    log = Log(sink=disk.put)
    with pytest.raises(TypeError, match="at turn/3/call cannot be logged: object cannot be stored as JSON"):
        log.record(call("turn/3/call"), {"x": object()})
    with pytest.raises(TypeError, match="at turn/3 cannot be logged"):
        log.record(request(BACKEND, path="turn/3"), Completion(usage={"raw": object()}))
    assert disk.lines == []


def test_captures_are_read_back_when_they_are_needed() -> None:
    disk, read = Disk(), []
    Log(sink=disk.put).record(request(BACKEND), Completion(text="a"))
    entry = disk.entries[0] | {"captures": "turns/x.safetensors"}
    log = Log([entry], tensors=lambda name: read.append(name) or {"resid_post.1": "tensor"})  # type: ignore[func-returns-value]
    assert read == []
    _, back = log.recall(request(BACKEND))
    assert (back.captures, read) == ({"resid_post.1": "tensor"}, ["turns/x.safetensors"])


def test_a_scoped_log_writes_under_its_prefix() -> None:
    disk = Disk()
    inner = ScopedLog(ScopedLog(Log(sink=disk.put), "turn/0/hook/0/0"), "hook/1/3")
    inner.record(request(BACKEND, path="turn/2"), Completion(text="a"))
    assert [e["path"] for e in disk.entries] == ["turn/0/hook/0/0/hook/1/3/turn/2"]
    outer = Log(disk.entries)
    assert ScopedLog(outer, "turn/0/hook/0/1").recall(request(BACKEND, path="turn/2")) == (False, None)
    known, back = ScopedLog(ScopedLog(outer, "turn/0/hook/0/0"), "hook/1/3").recall(
        request(BACKEND, path="turn/2")
    )
    assert (known, back.text) == (True, "a")
