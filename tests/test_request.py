import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from interlens.backends.scripted import ScriptedBackend
from interlens.chat.view import View
from interlens.request import Backend as BackendProtocol
from interlens.request import BackendSpec, Call, Completion, Forward, Generate, SamplingParams, digest_of
from interlens.seeds import Stream

SPEC = BackendSpec(kind="huggingface", model="m")
VIEW = View("ada", ({"role": "user", "content": "hello"},))
BASE = Generate(backend=SPEC, prompt=VIEW, sampling=SamplingParams(), max_new_tokens=8)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"logit_bias": {3: math.inf}}, "logit_bias"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        SamplingParams(**settings)


def test_applied_settings_are_those_that_change_anything() -> None:
    assert SamplingParams().applied() == {"temperature": 1.0}
    assert SamplingParams(temperature=np.float64(0.5), top_k=4).applied() == {"temperature": 0.5, "top_k": 4}
    banned = SamplingParams(logit_bias={"7": -math.inf})  # type: ignore[dict-item]
    assert banned.applied() == {"temperature": 1.0, "logit_bias": {"7": -math.inf}}


CHANGES: dict[str, tuple[Any, str]] = {
    "backend": (replace(SPEC, revision="v2"), "model"),
    "prompt": (View("ada", ({"role": "user", "content": "hallo"},)), "prompt"),
    "sampling": (SamplingParams(temperature=0.5), "sampling"),
    "max_new_tokens": (9, "max_new_tokens"),
    "stop": (("\n",), "stop"),
    "end_ids": ((2,), "stop"),
    "prefill": ("Yes", "prefill"),
    "drawn": (3, "prefill"),
    "counted": ((5,), "prefill"),
    "tools": (({"name": "f"},), "tools"),
    "stream": (Stream(job=1), "seed"),
    "logprobs": (0, "logprobs"),
    "plan": (type("Plan", (), {"digest": lambda self: "p"})(), "plan"),
}
HARMLESS: dict[str, Any] = {"path": "turn/9", "exclusive": True, "kv_reuse": False}


def test_a_digest_names_the_field_that_differs() -> None:
    """Every field of a request is either in a digest of its own, or changes no result."""
    assert CHANGES.keys() | HARMLESS.keys() == {f.name for f in fields(Generate)}
    before = BASE.digests()
    for field, (value, name) in CHANGES.items():
        now = replace(BASE, **{field: value}).digests()
        assert [k for k in now if now[k] != before[k]] == [name]
    for field, value in HARMLESS.items():
        assert replace(BASE, **{field: value}).digests() == before


def test_where_a_model_runs_is_not_in_the_digest() -> None:
    moved = replace(BASE, backend=replace(SPEC, device="cuda:1", options=(("kv_memory", 5),)))
    assert moved.digests() == BASE.digests()


def test_digests_of_passes_and_calls() -> None:
    one = Forward(backend=SPEC, prompt=VIEW).digests()
    changes = ({"logits": True}, {"logprobs": True}, {"prompt": CHANGES["prompt"][0]})
    names = [
        [k for k, v in replace(Forward(backend=SPEC, prompt=VIEW), **c).digests().items() if v != one[k]]
        for c in changes
    ]
    assert names == [["what"], ["what"], ["prompt"]]
    call = Call(fn=len, path="x")
    assert call.digests() == replace(call, args=(1,)).digests()
    assert call.digests() != replace(call, fn=max).digests()
    assert replace(call, version="1").digests() == Call(fn=max, path="y", version="1").digests()


def test_digest_of_values() -> None:
    assert digest_of({"a": 1, "b": [2.5, None]}) == digest_of({"b": (2.5, None), "a": 1})
    values = [0, "0", None, False, [], "", {}, [0], math.nan, "nan", {"a": 1}, ["a", 1], "\ud800", "é"]
    assert len({digest_of(v) for v in values}) == len(values)
    with pytest.raises(TypeError, match="object"):
        digest_of({"a": object()})


FULL = Completion(
    text="a\u2028b\x85c \ud800 é\x00",
    token_ids=(5, 0, 2),
    offsets=(1, 2, 2),
    finish="stop",
    n_tokens=3,
    n_prompt_tokens=11,
    logprobs=(-0.5, -math.inf, math.nan),
    entropy=(0.0, 1.25, math.inf),
    top_logprobs=(((5, -0.5), (6, -math.inf)), (), ((1, 0.0),)),
    receipts=({"kind": "capture", "mean_delta": math.nan},),
    usage={"cost": math.inf, "parts": [1, {"x": -math.inf}]},
    timings={"seconds": 0.25},
    reused_tokens=4,
    shared_prefill=True,
    tool_calls=({"name": "f"},),
)


def test_a_completion_passes_through_strict_json() -> None:
    text = json.dumps(FULL.stored(), allow_nan=False)
    back = Completion.restored(json.loads(text, parse_constant=pytest.fail))
    for f in fields(Completion):
        assert repr(getattr(back, f.name)) == repr(getattr(FULL, f.name)), f.name


@pytest.mark.parametrize(
    "completion",
    [
        Completion(),
        Completion(logprobs=(), entropy=(), top_logprobs=()),
        Completion(usage={}, receipts=()),
        Completion(finish="length", logprobs=(0.0,)),
    ],
)
def test_empty_is_not_absent(completion: Completion) -> None:
    assert Completion.restored(json.loads(json.dumps(completion.stored()))) == completion


def test_tensors_and_errors_are_not_stored() -> None:
    done = Completion(text="a", captures={"x": object()}, logits=object(), error=ValueError("no"))
    assert done.stored() == {"text": "a", "finish": "eos"}


def test_the_scripted_backend_is_a_backend() -> None:
    assert isinstance(ScriptedBackend(["a"]), BackendProtocol)
