"""Hosted models against a peer that speaks the providers' real formats: every reply in its own conversation,
one lane for everybody, and no word that is taken for another.
"""

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

import interlens
from interlens import (
    APIParticipant,
    Capture,
    Conversation,
    RunReport,
    ScriptedParticipant,
    SlidingWindow,
    Steer,
    TokenBudget,
)
from interlens.backends import lanes
from interlens.backends.lanes import Patience
from interlens.errors import ProviderError, ProviderStopped
from tests.peers.provider import Provider
from tests.runner.talk import rows

KINDS = ("openai", "anthropic", "openrouter")
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY")


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setattr(lanes, "PATIENCE", Patience(first=0.02, longest=0.1, stop_above=5.0, retries=4))
    for name in KEYS:
        monkeypatch.setenv(name, "key")
    with Provider() as peer:
        yield peer
        interlens.unload()


def at(peer: Provider, kind: str) -> str:
    return str(getattr(peer, f"{kind}_url"))


def person(peer: Provider, kind: str = "openai", name: str = "ana", **settings: Any) -> APIParticipant:
    settings = {"max_tokens": 40, "model_id": "m-1"} | settings
    return APIParticipant(name, provider=kind, base_url=at(peer, kind), **settings)


def talk(peer: Provider, kind: str = "openai", turns: int = 4, **settings: Any) -> Conversation:
    people = [person(peer, kind, name, **settings) for name in ("ana", "ben")]
    return Conversation(people, shared_context=lambda row: f"Speak about {row['topic']}.").turns(turns)


def bodies(peer: Provider) -> list[dict[str, Any]]:
    return [call.body for call in peer.calls if call.body and "messages" in call.body]


# -- the words


@pytest.mark.parametrize("kind", KINDS)
def test_every_reply_is_in_its_own_conversation(peer: Provider, kind: str, tmp_path: Path) -> None:
    peer.latency = lambda body, kind: (len(str(body)) * 7 % 11) / 400
    report = talk(peer, kind).set(data=rows(20)).rollout(out_dir=tmp_path, progress=False)
    assert not report.failed
    for i, result in enumerate(report.results.values()):
        contents = [m.content for m in result.transcript]
        for k in range(1, 5):
            assert contents[k].startswith("echo ")
            assert contents[k - 1] in contents[k]
        assert f"topic {i}." in contents[1]
        assert "\u2028" in contents[1]
        meta = result.transcript[1].metadata
        assert (meta["provider"], meta["finish"]) == (kind, "eos")
        assert meta["usage"]["output"] == meta["n_tokens"] > 0
    loaded = RunReport.load(tmp_path, trust=True)
    assert [r.transcript for r in loaded.results.values()] == [r.transcript for r in report.results.values()]
    said = {p.read_text() for p in tmp_path.rglob("*.json*")}
    assert not any('"key"' in text or "Bearer" in text for text in said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_the_same_words(peer: Provider, kind: str) -> None:
    one, two = (talk(peer, kind).set(shared_context="Hello.") for _ in range(2))
    pieces = list(one.stream("ana"))
    two.step("ana")
    assert "".join(pieces) == one.transcript[-1].content == two.transcript[-1].content
    assert one.transcript[-1].metadata["usage"] == two.transcript[-1].metadata["usage"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_set_is_sent_and_what_is_not_is_left_to_the_provider(peer: Provider, kind: str) -> None:
    Conversation([person(peer, kind)], shared_context="x").step("ana")
    plain = bodies(peer)[-1]
    assert not {"temperature", "top_p", "top_k", "stop", "stop_sequences"} & set(plain)
    settings: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ("END",),
        "system_prompt": "Be brief.",
    }
    Conversation([person(peer, kind, **settings)], shared_context="x").step("ana")
    body = bodies(peer)[-1]
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert body["stop_sequences" if kind == "anthropic" else "stop"] == ["END"]
    assert "Be brief." in json.dumps(body.get("system", body["messages"][0]))
    assert body.get("max_tokens", body.get("max_completion_tokens")) == 40


def test_settings_that_a_provider_has_no_word_for_raise(peer: Provider) -> None:
    for kind, settings, named in (
        ("openai", {"top_k": 5}, "openai has no top_k"),
        ("openai", {"min_p": 0.1}, "openai has no min_p"),
        ("anthropic", {"presence_penalty": 0.5}, "anthropic has no presence_penalty"),
        ("anthropic", {"temperature": 1.5}, "temperature up to 1"),
        ("openai", {"stop": tuple("abcde")}, "at most 4 stop strings"),
    ):
        conv = Conversation([person(peer, kind, **settings)], shared_context="x")
        with pytest.raises(ValueError, match=named):
            conv.step("ana")
    with pytest.raises(ValueError, match="takes no seed"):
        person(peer, "anthropic", seed=3)
    with pytest.raises(ValueError, match="thinking is for local models"):
        person(peer, thinking=True)
    with pytest.raises(ValueError, match="anthropic:m-1 gives no logprobs"):
        Conversation([person(peer, "anthropic")], shared_context="x").step("ana", logprobs=True)
    assert bodies(peer) == []


def test_bad_arguments_are_named(peer: Provider) -> None:
    for arguments, named in (
        ({"provider": "opnai", "model_id": "m"}, "provider is one of"),
        ({"provider": "openai"}, "model_id names the model"),
        ({"provider": "openrouter", "model_id": "m", "batch": True}, "openrouter has no batch API"),
        ({"provider": "openai", "model_id": "m", "upstream": ("x",)}, "are openrouter's"),
        ({"provider": "openai", "model_id": "m", "prices": {"inputs": 1}}, 'did you mean "input"'),
    ):
        with pytest.raises(ValueError, match=named):
            APIParticipant("ana", **arguments)
    with pytest.raises(TypeError, match='did you mean "temperature"'):
        APIParticipant("ana", provider="openai", model_id="m", temprature=1)


def test_a_look_inside_is_refused_before_anything_is_asked(peer: Provider) -> None:
    conv = Conversation([person(peer)], shared_context="x").turns(1)
    with pytest.raises(ValueError, match="ana is hosted: Capture needs a model whose inside can be seen"):
        conv.hook(Capture(layers=[0]))
    with pytest.raises(ValueError, match="hosted"):
        conv.hook(Steer([1.0], layers=[0]), speaker="ana")
    assert bodies(peer) == []


def test_without_a_key_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    conv = Conversation([APIParticipant("ana", provider="openai", model_id="m")], shared_context="x")
    with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
        conv.step("ana")


def test_a_key_is_nowhere_but_in_the_client(
    peer: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    conv = talk(peer).set(data=rows(2))
    report = conv.rollout(out_dir=tmp_path, progress=False)
    assert not report.failed
    assert all("sk-very-secret" in str(c.headers) for c in peer.calls if c.body)
    kept = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())
    texts = [kept, repr(conv), repr(conv.recipe), str(conv.recipe.describe()), report._repr_html_()]
    texts += [repr(lanes.LOOP.lanes), pickle.dumps(conv.recipe.participants[0]).decode("latin1")]
    conv.set(shared_context="x").save(tmp_path / "saved")
    texts.append((tmp_path / "saved" / "conversation.json").read_text())
    assert not any("very-secret" in text for text in texts)


# -- tools, reasoning, refusals


def test_what_was_thought_before_a_call_is_shown_again(peer: Provider) -> None:
    """Anthropic refuses a tool's result whose call does not stand after the signed thinking it came from."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reply(body: dict[str, Any], kind: str) -> Any:
        if "tool_result" in json.dumps(body["messages"]):
            return "It is 42."
        return {
            "reasoning": "forty and two",
            "tool_calls": [{"name": "add", "arguments": {"a": 40, "b": 2}}],
        }

    peer.reply = reply
    judge = person(peer, "anthropic", tools=(add,), extra={"thinking": {"type": "adaptive"}})
    conv = Conversation([judge, person(peer, "anthropic", "ben")], shared_context="40 + 2?")
    conv.step("ana")
    asked = bodies(peer)[-1]["messages"][1]
    assert [part["type"] for part in asked["content"]] == ["thinking", "tool_use"]
    assert asked["content"][0] == {"type": "thinking", "thinking": "forty and two", "signature": "cGVlcg=="}
    conv.step("ben")
    assert "thinking" not in json.dumps(bodies(peer)[-1]["messages"])  # another's thoughts are his own


def test_replies_that_are_no_answer_are_counted_in_the_summary(peer: Provider, tmp_path: Path) -> None:
    replies: list[Any] = [
        "fine",
        {"refusal": "I will not."},
        {"text": "", "finish": "length"},
        {"text": "cut", "finish": "length"},
    ]
    peer.reply = lambda body, kind: next(
        r for i, r in enumerate(replies) if f"topic {i}." in json.dumps(body["messages"])
    )
    conv = talk(peer, "openai").turns(1).set(data=rows(4))
    report = conv.rollout(out_dir=tmp_path, progress=False)
    for one in (report, RunReport.load(tmp_path, trust=True)):
        assert repr(one) == (
            "RunReport(4 jobs: 4 done, 1 with empty replies, 1 with refused replies, "
            "2 with truncated replies)"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_tools(peer: Provider, kind: str) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reply(body: dict[str, Any], kind: str) -> Any:
        told = json.dumps(body["messages"][2:])
        if "tool_result" in told or '"tool"' in told:
            return "It is 42." if '"42"' in told else "It is unknown."
        calls = [{"name": "add", "arguments": {"a": 40, "b": 2}}, {"name": "nothing", "arguments": "{"}]
        return {"text": "Let me see.", "tool_calls": calls}

    peer.reply = reply
    conv = Conversation(
        [person(peer, kind, tools=(add,)), person(peer, kind, "ben")], shared_context="40 + 2?"
    )
    message = conv.step("ana")
    assert message is not None
    assert message.content == "It is 42."
    [step] = message.metadata["tool_trail"]
    assert step["results"][0] == "42"
    assert ("there is no tool" if kind == "anthropic" else "could not be read as JSON") in step["results"][1]
    both = [json.loads(json.dumps(b)) for b in bodies(peer)]
    assert len(both) == 2
    assert message.metadata["usage"]["input"] > 0
    assert message.metadata["n_tokens"] == message.metadata["usage"]["output"]
    conv.step("ben")
    assert "add" not in json.dumps(bodies(peer)[-1]["messages"])  # a loop is seen by its owner alone
    conv.step("ana")
    assert "42" in json.dumps(bodies(peer)[-1]["messages"])


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_refusals_and_replies_that_were_cut(peer: Provider, kind: str) -> None:
    answers: list[Any] = [
        {"text": "Yes.", "reasoning": "It says so."},
        {"refusal": "I will not.", "finish": "refusal"}
        if kind != "anthropic"
        else {"text": "I will not.", "finish": "refusal"},
        {"text": "", "finish": "length", "reasoning": "too long", "usage": {"output": 40, "reasoning": 40}},
    ]
    peer.reply = lambda body, kind: answers.pop(0)
    extra = {"thinking": {"type": "adaptive"}} if kind == "anthropic" else {"reasoning_effort": "low"}
    people = [person(peer, kind, name, extra=extra, model_id="gpt-5") for name in ("ana", "ben")]
    conv = Conversation(people, shared_context="Really?")
    conv.run(3)
    assert all(extra.items() <= body.items() for body in bodies(peer))
    first, second, third = conv.transcript[1:]
    assert first.content == "Yes."
    assert first.metadata.get("reasoning") == (None if kind == "openai" else "It says so.")
    assert first.metadata["usage"]["reasoning"] > 0
    assert "It says so." not in json.dumps(bodies(peer)[1]["messages"])
    assert (second.content, second.metadata["finish"]) == ("I will not.", "refusal")
    assert (third.content, third.metadata["finish"], third.metadata["n_tokens"]) == ("", "length", 40)


def test_what_a_server_calls_the_cap_is_found_out_and_told(peer: Provider) -> None:
    def refused(body: dict[str, Any]) -> bool:
        return "max_tokens" in body

    error = {"error": {"message": "Unsupported parameter: max_tokens", "param": "max_tokens", "code": "x"}}
    peer.fault("chat", times=None, when=refused, status=400, body=error)
    conv = Conversation([person(peer), person(peer, name="ben")], shared_context="x")
    conv.run(2)
    assert conv.transcript[1].metadata["served"]["rules"] == ["max_tokens was sent as max_completion_tokens"]
    assert "rules" not in conv.transcript[2].metadata.get("served", {})  # found out once
    assert len(bodies(peer)) == 3


def test_rules_for_what_anthropic_refuses_are_told(peer: Provider) -> None:
    people = [person(peer, "anthropic", name) for name in ("ana", "ben", "eve")]
    conv = Conversation(people, shared_context="x")
    conv.say("ben", "One.")
    conv.say("eve", "")
    message = conv.step("ana")
    assert message is not None
    rules = message.metadata["served"]["rules"]
    assert any("merged" in rule for rule in rules)
    roles = [m["role"] for m in bodies(peer)[-1]["messages"]]
    assert roles == ["user"]


# -- the lane


def test_one_lane_for_participants_judges_and_analyzers(peer: Provider) -> None:
    peer.latency = 0.02
    wide = {"max_concurrency": 4}
    judge = Conversation([person(peer, name="judge", **wide)], shared_context="Rate it.")

    def rate(conv: Conversation) -> list[str]:
        return [judge.branch().sample("judge", m.content).content for m in conv.transcript]

    conv = talk(peer, turns=3, **wide).set(data=rows(25)).analyzer(rate)
    report = conv.rollout(progress=False)
    assert report.counts() == {"done": 25, "limit": 0, "failed": 0, "analysis_failed": 0}
    assert len(bodies(peer)) == 25 * 3 + 25 * 4
    assert peer.most_in_flight == 4


def test_waiting_for_a_place_is_no_time_out(peer: Provider) -> None:
    peer.latency = 0.1
    conv = talk(peer, turns=1, max_concurrency=2, timeout=0.4).set(data=rows(40))
    report = conv.rollout(progress=False)
    assert not report.failed
    assert len(bodies(peer)) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_requests_pause_the_lane_and_halve_it(peer: Provider, kind: str) -> None:
    peer.latency = 0.02
    peer.fault(
        "messages" if kind == "anthropic" else "chat", status=429, headers={"retry-after": "0.5"}, times=3
    )
    conv = talk(peer, kind, turns=2, max_concurrency=8).set(data=rows(30))
    report = conv.rollout(progress=False)
    assert not report.failed
    assert len(bodies(peer)) == 63
    refused = [c for c in peer.calls if c.status == 429]
    later = [c.time for c in peer.calls if c.time > refused[-1].time + 0.05 and c.body]
    assert min(later) - refused[0].time > 0.4  # everybody waited
    [lane] = [lane for key, lane in lanes.LOOP.lanes.items() if key[0].startswith(peer.url)]
    assert lane.cuts >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 529}, {"drop": True}, {"drop": "before"}])
def test_what_passes_is_tried_again(peer: Provider, kind: str, fault: dict[str, Any]) -> None:
    peer.fault("messages" if kind == "anthropic" else "chat", times=3, **fault)
    report = talk(peer, kind, turns=2).set(data=rows(4)).rollout(progress=False)
    assert not report.failed
    assert len(bodies(peer)) == 4 * 2 + 3


@pytest.mark.parametrize("kind", KINDS)
def test_retries_are_ours_alone_and_end(peer: Provider, kind: str) -> None:
    peer.fault("messages" if kind == "anthropic" else "chat", times=None, status=500)
    report = talk(peer, kind, turns=1).set(data=rows(1)).rollout(progress=False)
    assert report.failed == ["row_00000"]
    assert "answered 500" in str(report["row_00000"].error)
    assert len(bodies(peer)) == 1 + 4


@pytest.mark.parametrize(
    ("key", "named"), [("quota", "quota"), ("billing", "402"), ("wrong", "401"), ("forbidden", "403")]
)
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_a_stop_ends_the_run_and_fails_nobody(
    peer: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, key: str, named: str
) -> None:
    if (kind, key) == ("anthropic", "quota"):
        pytest.skip("anthropic has no quota code; billing is the case")
    conv = talk(peer, kind, turns=2, max_concurrency=5).set(data=rows(30))
    for name in KEYS:
        monkeypatch.setenv(name, key)
    with pytest.raises(ProviderStopped, match=named):
        conv.rollout(out_dir=tmp_path, progress=False)
    assert len(bodies(peer)) <= 5
    assert len(RunReport.load(tmp_path, trust=True)) == 0
    interlens.unload()
    for name in KEYS:
        monkeypatch.setenv(name, "key")
    report = conv.rollout(out_dir=tmp_path, progress=False)
    assert report.counts()["done"] == 30


def test_a_wait_of_days_ends_the_run(peer: Provider, tmp_path: Path) -> None:
    peer.fault("chat", status=429, headers={"retry-after": "100000"})
    with pytest.raises(ProviderStopped, match="asks to wait 100000 s"):
        talk(peer).set(data=rows(3)).rollout(out_dir=tmp_path, progress=False)
    interlens.unload()
    assert talk(peer).set(data=rows(3)).rollout(out_dir=tmp_path, progress=False).counts()["done"] == 3


def test_words_about_quota_are_not_a_quota(peer: Provider) -> None:
    peer.fault("chat", status=429, message="INSUFFICIENT QUOTA of concurrent requests", times=2)
    assert not talk(peer, turns=1).set(data=rows(3)).rollout(progress=False).failed


def test_an_error_in_the_body_of_a_200(peer: Provider) -> None:
    peer.fault("chat", in_body=True, status=429, times=2)
    report = talk(peer, "openrouter", turns=1).set(data=rows(2)).rollout(progress=False)
    assert not report.failed
    assert len(bodies(peer)) == 4


def test_openrouter_pins_who_serves_and_checks_it(peer: Provider) -> None:
    conv = Conversation(
        [person(peer, "openrouter", upstream=("Alpha",), quantizations=("bf16",))], shared_context="x"
    )
    peer.reply = lambda body, kind: {"text": "ok", "answer": {"provider": "Alpha"}}
    message = conv.step("ana")
    assert message is not None
    assert message.metadata["served"]["upstream"] == "Alpha"
    routing = bodies(peer)[-1]["provider"]
    assert (routing["order"], routing["allow_fallbacks"], routing["quantizations"]) == (
        ["Alpha"],
        False,
        ["bf16"],
    )
    peer.reply = lambda body, kind: {"text": "ok", "answer": {"provider": "Beta"}}
    with pytest.raises(ProviderError, match="served Beta, though only Alpha"):
        conv.step("ana")


def test_a_prompt_that_is_too_long_is_a_limit(peer: Provider) -> None:
    peer.rules.context = 60
    for kind in ("openai", "anthropic"):
        data = [{"topic": "short"}, {"topic": "long " * 80}, {"topic": "short"}]
        report = talk(peer, kind, turns=1).set(data=data).rollout(progress=False)
        assert [r.outcome for r in report.results.values()] == ["done", "limit", "done"]
        assert report["row_00001"].reason == "context"


# -- caps, cost, loops


def test_a_budget_never_raises_a_cap(peer: Provider) -> None:
    conv = talk(peer, turns=3).set(data=rows(2))
    with TokenBudget(per_conversation=500, per_turn=7):
        conv.rollout(progress=False)
    caps = {b.get("max_tokens") for b in bodies(peer)}
    assert caps == {7}
    with TokenBudget(per_conversation=1000):
        conv.rollout(progress=False)
    assert max(b.get("max_tokens") for b in bodies(peer)) == 40


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_costs(peer: Provider, kind: str) -> None:
    used = {"input": 1000, "cached": 400, "output": 50}
    peer.reply = lambda body, kind: {"text": "ok", "usage": used}
    prices = {"input": 2.0, "output": 10.0, "cached": 0.5}
    conv = Conversation([person(peer, kind, prices=prices)], shared_context="x")
    message = conv.step("ana")
    assert message is not None
    assert message.metadata["usage"]["cached"] == 400
    assert message.metadata["cost"] == pytest.approx((600 * 2 + 400 * 0.5 + 50 * 10) / 1e6)
    limited = conv.reset().turns(50).run_until(interlens.CostBudget(0.005))
    limited.run(until=interlens.CostBudget(0.005), turns=50)
    assert limited.n_turns == 3


def test_in_threads_and_twice(peer: Provider) -> None:
    conv = talk(peer, turns=2).set(data=rows(5))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(conv.rollout(progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found.append(conv.rollout(progress=False))
    assert len(found) == 4
    assert (
        len({json.dumps([t.to_list() for t in r.transcripts().values()], default=str)[:0] for r in found})
        == 1
    )
    assert all(not r.failed for r in found)


def test_a_turn_that_is_closed_is_cancelled(peer: Provider) -> None:
    peer.fault("chat", slow_drip=0.2)
    conv = talk(peer).set(shared_context="A long enough prompt to be echoed in many pieces, word by word.")
    pieces = conv.stream("ana")
    next(pieces)
    pieces.close()
    began = time.monotonic()
    assert conv.n_turns == 0
    conv.step("ana")
    assert time.monotonic() - began < 2


def test_a_saved_conversation_comes_back(peer: Provider, tmp_path: Path) -> None:
    conv = Conversation(
        [person(peer, prices={"input": 1.0}), person(peer, "anthropic", "ben")], shared_context="x"
    )
    conv.run(2)
    conv.save(tmp_path)
    again = Conversation.load(tmp_path)
    assert again.transcript == conv.transcript
    assert again.recipe.describe() == conv.recipe.describe()
    again.run(1)
    assert again.transcript[-1].author == "ana"


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_equals_a_default_is_sent_all_the_same(peer: Provider, kind: str) -> None:
    """The server's own default may be another."""
    message = Conversation([person(peer, kind, temperature=1.0, top_p=1.0)], shared_context="x").step("ana")
    assert message is not None
    assert (bodies(peer)[-1]["temperature"], bodies(peer)[-1]["top_p"]) == (1.0, 1.0)
    assert message.metadata["sampling"] == {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 40}
    message = Conversation([person(peer, kind)], shared_context="x").step("ana")
    assert message is not None
    assert message.metadata["sampling"] == {"max_new_tokens": 40}  # what the provider took is not known


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reply", "named"),
    [({"text": "ok", "usage": None}, "told no usage"), ({"text": "ok", "finish": "odd"}, "'odd'")],
)
def test_what_cannot_be_counted_or_is_not_whole_is_an_error(
    peer: Provider, kind: str, reply: dict[str, Any], named: str
) -> None:
    peer.reply = lambda body, kind: reply
    if kind == "anthropic" and reply.get("usage", 1) is None:
        reply = {"text": "ok", "answer": {"usage": None}}
    with pytest.raises(ProviderError, match=named):
        Conversation([person(peer, kind)], shared_context="x").step("ana")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_shows_no_word_twice(peer: Provider, kind: str) -> None:
    peer.fault("messages" if kind == "anthropic" else "chat", cut=5)
    conv = talk(peer, kind).set(
        shared_context="A long enough prompt to be echoed in many pieces, word by word."
    )
    with pytest.raises(ProviderError):
        list(conv.stream("ana"))
    assert len(bodies(peer)) == 1
    assert conv.n_turns == 0


def test_a_lane_that_was_stopped_is_tried_by_the_next_call(peer: Provider) -> None:
    """The same process, the same backend: whoever has paid calls again."""
    peer.fault("chat", status=429, code="insufficient_quota", times=3)
    conv = talk(peer, turns=1, max_concurrency=3).set(data=rows(12))
    with pytest.raises(ProviderStopped):
        conv.rollout(progress=False)
    peer.faults.clear()
    known = list(lanes.LOOP.lanes.values())
    peer.wait(
        lambda: not any(lane.in_flight or lane.queued for lane in known)
    )  # what was broken off has left
    assert conv.rollout(progress=False).counts()["done"] == 12


def test_a_stop_holds_for_the_calls_of_its_run_that_come_late() -> None:
    """Nothing of theirs is under way any more, and they are not sent all the same; a later run's are."""
    sent: list[str] = []

    async def use() -> list[Any]:
        lane = lanes.Lane("m", 4, lanes.PATIENCE)

        async def ask(name: str, run: int, error: Exception | None = None) -> str:
            async def send() -> str:
                sent.append(name)
                if error is not None:
                    raise error
                return name

            return await lane.call(send, lambda e: lanes.Failure(kind="stop", error=e), run)

        stop = ProviderStopped("no quota")
        calls = [
            ("first", 7, stop),
            ("late", 7, None),
            ("of an older one", 3, None),
            ("of the next", 8, None),
        ]
        calls += [("first again", 8, stop), ("late again", 8, None), ("nobody's", 0, None)]
        return [(await asyncio.gather(ask(*call), return_exceptions=True))[0] for call in calls]

    first, late, older, following, again, late_again, nobodys = asyncio.run(use())
    assert all(isinstance(e, ProviderStopped) for e in (first, late, older, again, late_again))
    assert (following, nobodys) == ("of the next", "nobody's")
    assert sent == ["first", "of the next", "first again", "nobody's"]


def test_a_lane_is_as_narrow_as_the_narrowest_that_lives(peer: Provider) -> None:
    peer.latency = 0.02
    talk(peer, turns=1, max_concurrency=2).set(data=rows(8)).rollout(progress=False)
    assert peer.most_in_flight == 2
    interlens.unload()
    talk(peer, turns=1, max_concurrency=6).set(data=rows(18)).rollout(progress=False)
    assert peer.most_in_flight == 6


def test_a_cost_budget_without_prices_is_refused(peer: Provider) -> None:
    conv = Conversation([person(peer)], shared_context="x")
    with pytest.raises(ValueError, match="ana's turns have no cost"):
        conv.run(turns=5, until=interlens.CostBudget(1.0))
    assert conv.n_turns == 1


def test_workers_share_the_width_of_a_lane(peer: Provider) -> None:
    """The provider sees no more calls at a time because there are more processes."""
    peer.latency = 0.03
    report = (
        talk(peer, turns=2, max_concurrency=4)
        .set(data=rows(40))
        .rollout(devices=["cpu", "cpu"], progress=False)
    )
    assert not report.failed
    assert len({r.device for r in report.results.values()}) == 2
    assert peer.most_in_flight <= 4


def test_a_window_of_messages_holds_for_models_whose_context_is_not_known(peer: Provider) -> None:
    conv = talk(peer, "openai").set(shared_context="topic 1.", context_policy=SlidingWindow(2))
    conv.run(turns=5)
    contents = [m["content"] for m in bodies(peer)[-1]["messages"]]
    assert contents[0] == "topic 1."
    said = [m.content for m in conv.transcript]
    assert [c for c in contents if c in said] == [said[0], said[3], said[4]]
    assert [m["content"] for m in conv.branch_from(4).view("ana").messages] == contents


def test_a_window_holds_for_a_script_too() -> None:
    seen: list[int] = []

    def count(view: Any) -> str:
        seen.append(len([m for m in view.messages if m["content"] != "Continue."]))
        return "so"

    people = [ScriptedParticipant("ana", count), ScriptedParticipant("ben", count)]
    Conversation(people, shared_context="x", context_policy=SlidingWindow(2)).run(turns=6)
    assert seen == [1, 2, 3, 3, 3, 3]
