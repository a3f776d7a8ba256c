"""What must never go wrong silently: seeds, waves, lineups, caps, budgets, counts, global state."""

import json
import random

import pytest
import torch

import interlens
from interlens import (
    AutoModelParticipant,
    Capture,
    Conversation,
    ScriptedParticipant,
    Span,
    StopCondition,
    TokenBudget,
    dataset_field,
)
from interlens.engine.load import tiny
from interlens.interp.plan import RowPlan
from interlens.request import Generate, SamplingParams
from interlens.runner.batched import co_step, schedule_signature


def model(name, **settings):
    return AutoModelParticipant.from_pretrained("tiny", name=name, **({"max_new_tokens": 6} | settings))


def recipe(turns=3, **settings):
    people = [model("alice", **settings), model("bob", **settings)]
    return Conversation(people, shared_context="Tea or coffee?").turns(turns)


def said(report):
    return {job: [m.token_ids for m in t][1:] for job, t in report.transcripts().items()}


# 1. seeds


def test_a_seed_means_the_same_in_a_batch_in_waves_and_one_at_a_time():
    whole = said(recipe().rollout(n=7, seed=3))
    waves = said(recipe().rollout(n=7, seed=3, max_batch_size=2))
    alone = said(recipe().rollout(n=7, seed=3, batched=False))
    assert whole == waves == alone
    assert len({str(t) for t in whole.values()}) == 7


def test_a_run_says_whether_its_rows_are_exact(tmp_path):
    recipe().rollout(n=1, out_dir=tmp_path)
    claims = json.loads((tmp_path / "manifest.json").read_text())["models"]["tiny"]
    assert claims == {"exact": True, "batched": True, "why": "", "dtype": "float32", "device": "cpu"}


def test_another_seed_gives_other_text_and_job_i_has_seed_s_plus_i():
    first, second = said(recipe().rollout(n=4)), said(recipe().rollout(n=4, seed=1))
    assert first["rollout_00001"] == second["rollout_00000"]
    assert first["rollout_00000"] != second["rollout_00000"]
    live = recipe().seed(2)
    live.run()
    assert [m.token_ids for m in live.transcript][1:] == first["rollout_00002"]
    shifted = said(recipe().seed(1).rollout(n=2))
    assert shifted["rollout_00000"] == second["rollout_00000"]


def test_samples_of_a_row_differ_and_do_not_move_other_rows():
    data = [{"q": "one"}, {"q": "two"}]
    base = Conversation([model("a")], shared_context=dataset_field("q")).turns(1).data(data)
    two, three = said(base.rollout(samples=2)), said(base.rollout(samples=3))
    assert list(three) == [f"row_{i:05d}/sample_{k:02d}" for i in range(2) for k in range(3)]
    assert {job: three[job] for job in two} == two
    assert len({str(t) for t in three.values()}) == 6


def test_the_mode_is_recorded_and_does_not_change_the_tokens():
    batched, alone = recipe().rollout(n=3), recipe().set(execution_mode="deterministic").rollout(n=3)
    assert said(batched) == said(alone)
    for report, flag in ((batched, True), (alone, False)):
        for transcript in report.transcripts().values():
            assert {m.metadata["batched"] for m in transcript[1:]} == {flag}


# 2. lineups


def test_two_lineups_on_one_model_keep_their_own_settings():
    cold = Conversation([model("x", temperature=0.0, max_new_tokens=3)], shared_context="Go.").turns(2)
    hot = Conversation([model("y", temperature=1.3, max_new_tokens=9, top_k=5)], shared_context="Go.").turns(
        2
    )
    report = interlens.run([cold.name("cold"), hot.name("hot")])
    assert list(report.results) == ["cold", "hot"]
    for name, author, temperature, cap in (("cold", "x", 0.0, 3), ("hot", "y", 1.3, 9)):
        for message in report.results[name].transcript[1:]:
            assert message.author == author
            assert message.metadata["sampling"]["temperature"] == temperature
            assert message.metadata["n_tokens"] <= cap
    assert report.results["hot"].transcript[1].metadata["sampling"]["top_k"] == 5
    alone = cold.rollout().results["rollout_00000"].transcript
    assert [m.token_ids for m in alone] == [m.token_ids for m in report.results["cold"].transcript]


def test_two_lineups_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two lineups are called 'same'"):
        interlens.run([recipe().name("same"), recipe().name("same")])
    with pytest.raises(ValueError, match="has no name"):
        interlens.run([recipe()])


# 3. the user's own model


def test_the_users_model_works_untouched_between_and_after_steps():
    loaded, tokenizer = tiny()
    ids = torch.tensor([tokenizer("Hello there")["input_ids"]])
    attention = loaded.config._attn_implementation
    with torch.no_grad():
        logits = loaded(ids).logits.clone()
        greedy = loaded.generate(ids, do_sample=False, max_new_tokens=8)
    conv = Conversation([AutoModelParticipant.from_model(loaded, tokenizer, name="m")], shared_context="Hm.")
    for _ in range(2):
        conv.step("m", max_new_tokens=4)
        own = conv.participant("m").model
        assert own is loaded
        assert loaded.config._attn_implementation == attention
        with torch.no_grad():
            assert torch.allclose(own(ids).logits, logits, atol=1e-5)
            assert own.generate(ids, do_sample=False, max_new_tokens=8).equal(greedy)
    loaded(ids).logits.sum().backward()
    assert loaded.lm_head.weight.grad is not None


# 5. stops and budgets


class Counting(StopCondition):
    """Stops after its own count of messages, which grows with the seed."""

    def __init__(self):
        self.seen = 0

    def reset(self):
        self.seen = 0

    def should_stop(self, conv, last_message):
        self.seen += 1
        return self.seen > 2 + conv.recipe.seed % 3


def test_a_stateful_stop_shared_by_a_hundred_jobs_stops_each_at_its_own_count():
    people = [ScriptedParticipant("a", lambda view: "hm")]
    report = Conversation(people).run_until(Counting()).rollout(n=100)
    lengths = [len(t) for t in report.transcripts().values()]
    assert lengths == [2 + i % 3 for i in range(100)]


def test_a_budget_is_spent_to_the_token_and_no_row_is_cut_because_of_another():
    budget = {f"row_{i:05d}": 5 + 4 * i for i in range(8)}
    end = {2: float("-inf")}
    people = [model("alice", logit_bias=end), model("bob", logit_bias=end, max_new_tokens=4)]
    data = [{"q": str(i)} for i in range(8)]
    base = Conversation(people, shared_context=dataset_field("q")).data(data)
    report = base.run_until(TokenBudget(per_conversation=budget)).rollout()
    assert {job: r.tokens_generated for job, r in report.results.items()} == budget
    by_row = base.run_until(TokenBudget(per_conversation=lambda row: 5 + 4 * int(row["q"]))).rollout()
    assert said(by_row) == said(report)
    with TokenBudget(per_conversation=13, per_turn=5):
        ambient = base.turns(50).rollout()
    for transcript in ambient.transcripts().values():
        assert [m.metadata["n_tokens"] for m in transcript[1:]] == [5, 4, 4]


# 6. counts


def test_n_tokens_is_the_same_on_every_path():
    conv = recipe()
    stepped = conv.branch().step("alice")
    sampled = conv.branch().sample("alice", n=2)
    streamed = conv.branch()
    "".join(streamed.stream("alice"))
    rolled = conv.turns(1).rollout().results["rollout_00000"].transcript[-1]
    for message in (stepped, *sampled, streamed.transcript[-1], rolled):
        assert message.metadata["n_tokens"] == len(message.token_ids)
    assert rolled.token_ids == stepped.token_ids == streamed.transcript[-1].token_ids


def test_the_end_token_is_counted():
    ends = Conversation([model("a", logit_bias={2: 100.0})], shared_context="Go.")
    message = ends.step("a")
    assert message.content == ""
    assert message.token_ids == (2,)
    assert (message.metadata["n_tokens"], message.metadata["finish"]) == (1, "eos")
    assert ends.run(2)[-1].metadata["n_tokens"] == 1


# 7. global state


def test_global_generators_are_neither_read_nor_written():
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    first = said(recipe().rollout(n=2))
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(2)
    random.seed(2)
    assert said(recipe().rollout(n=2)) == first


def test_what_the_checkpoint_brings_in_is_recorded():
    loaded, tokenizer = tiny()
    loaded.generation_config.top_k = 11
    loaded.generation_config.repetition_penalty = 1.2
    loaded.generation_config.temperature = 0.6
    person = AutoModelParticipant.from_model(loaded, tokenizer, name="m", temperature=0.9, max_new_tokens=3)
    sampling = Conversation([person], shared_context="Hm.").step("m").metadata["sampling"]
    assert sampling == {"temperature": 0.9, "top_k": 11, "repetition_penalty": 1.2, "max_new_tokens": 3}


# 9. failures stay with their job


def test_one_bad_row_harms_nobody(tmp_path):
    def column(row):
        if row["q"] == "bad":
            raise KeyError("no such thing")
        return row["q"]

    def analyse(conv):
        return {"n": len(conv.transcript), "share": 1 / (0 if conv.row["q"] == "odd" else 1)}

    data = [{"q": q} for q in ("a", "bad", "odd", "d")]
    base = Conversation([model("m")], shared_context=column).turns(1).data(data).analyzer(analyse)
    report = base.rollout(out_dir=tmp_path)
    assert report.failed == ["row_00001"]
    assert "no such thing" in report.results["row_00001"].error
    assert "ZeroDivisionError" in report.results["row_00002"].analysis_error
    assert report.results["row_00002"].error is None
    assert report.results["row_00003"].analysis == {"n": 2, "share": 1.0}
    assert report.counts() == {"done": 3, "limit": 0, "failed": 1, "analysis_failed": 1}
    on_disk = interlens.RunReport.load(tmp_path)
    assert on_disk.counts() == report.counts()
    assert said(on_disk) == said(report)


def test_a_context_that_is_full_is_a_limit_and_not_a_failure():
    report = recipe(turns=50).set(context_limit=160).rollout(n=2)
    assert [r.outcome for r in report.results.values()] == ["limit", "limit"]
    assert {r.reason for r in report.results.values()} == {"context"}
    assert all(len(r.transcript) > 2 for r in report.results.values())


# activations of a rollout


def test_activations_of_a_rollout_are_those_of_the_live_conversation(tmp_path):
    hooked = recipe(turns=2).hook(Capture(layers=1, span=Span(phase="generated")), speaker="alice")
    kept, disk = hooked.rollout(n=3), hooked.rollout(n=3, out_dir=tmp_path)
    live = hooked.branch()
    live.run()
    wanted = live.transcript[1].activations.at(layer=1)
    for report in (kept, disk, interlens.RunReport.load(tmp_path)):
        rows = report.activations(site="resid_post.1", speaker="alice")
        frame = rows.frame()
        assert len(rows.tensor) == len(frame)
        mine = rows.tensor[torch.tensor((frame.job == "rollout_00000").tolist())]
        assert mine.equal(wanted)
    again = hooked.rollout(n=3, out_dir=tmp_path)
    assert again.skipped == list(again.results)
    assert again.activations(site="resid_post.1").tensor.equal(kept.activations(site="resid_post.1").tensor)


def test_records_on_disk_are_strict_json(tmp_path):
    recipe().rollout(n=2, out_dir=tmp_path)

    def refuse(constant):
        raise AssertionError(constant)

    files = [*tmp_path.glob("seg/*.jsonl"), *tmp_path.glob("turns/*.jsonl")]
    lines = [line for file in files for line in file.read_bytes().split(b"\n") if line]
    assert len(lines) == 2 + 6
    assert all(json.loads(line, parse_constant=refuse) for line in lines)


# co_step


def test_co_step_drives_the_given_conversations_in_place():
    convs = [recipe().seed(i) for i in range(3)]
    assert co_step(convs, 2) is convs
    live = [recipe().seed(i) for i in range(3)]
    for conv in live:
        conv.run(2)
    assert [c.transcript for c in convs] == [c.transcript for c in live]
    assert co_step([], 3) == []
    with pytest.raises(ValueError, match="would never end"):
        co_step([recipe()], None)
    other = co_step([recipe()], 2, group_seed=7)[0]
    assert other.transcript != convs[0].transcript
    assert (
        schedule_signature(recipe(), 2) == schedule_signature(convs[0], 2) != schedule_signature(recipe(), 3)
    )


def test_participants_answer_views_in_a_batch():
    views = [recipe().view("alice"), recipe().view("bob")]
    person = model("alice")
    first = person.generate_batch(views, turn=0, group_seed=5, max_new_tokens=4)
    assert [m.metadata["n_tokens"] <= 4 for m in first] == [True, True]
    assert [m.token_ids for m in first] == [
        m.token_ids for m in person.generate_batch(views, turn=0, group_seed=5, max_new_tokens=4)
    ]


def test_forward_and_complete_on_raw_text():
    person = model("m")
    ids = person.tokenizer("raw text")["input_ids"]
    one = person.forward("raw text", capture=Capture(layers=0), logits=True)
    many = person.forward(["raw text", ids], capture=[Capture(layers=0)])
    with torch.no_grad():
        own = person.model(torch.tensor([ids])).logits[0]
    assert torch.allclose(one.logits, own, atol=1e-4)
    assert one.logprobs == many[0].logprobs == many[1].logprobs
    assert one.activations.at().equal(many[1].activations.at())
    wanted = torch.log_softmax(own, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(one.logprobs), wanted, atol=1e-4)
    done = person.complete("raw text", max_new_tokens=5, temperature=0.0)
    assert list(done.token_ids) == own.argmax(-1)[-1:].tolist() + list(done.token_ids[1:])
    with pytest.raises(TypeError, match="temperature"):
        person.complete("x", temprature=1)


def test_unload_frees_and_the_next_use_loads_again():
    conv = recipe()
    conv.run(1)
    before = conv.participant("alice").model
    assert interlens.unload(conv.participant("alice")) == ["tiny"]
    assert conv.participant("alice").model is not before
    conv.run(1)
    assert conv.n_turns == 2


def test_data_that_is_used_up_says_so_and_no_row_is_pulled_in_vain():
    pulled = []

    def stream():
        for i in range(10):
            pulled.append(i)
            yield {"q": str(i)}

    source = stream()
    base = Conversation([ScriptedParticipant("s", lambda v: "x")], shared_context=dataset_field("q")).turns(1)
    assert len(base.data(source).rollout(n=3)) == 3
    assert pulled == [0, 1, 2]
    assert len(base.data(source).rollout(n=20)) == 7
    with pytest.raises(ValueError, match="used up"):
        base.data(source).rollout()


def test_a_capture_beside_a_prefill_is_refused():
    backend = model("m").resident
    request = Generate(
        backend=backend,
        prompt=recipe().view("alice"),
        sampling=SamplingParams(),
        max_new_tokens=2,
        prefill="Well",
        plan=RowPlan(captures=(("resid_post", 0),), generated=True),
    )
    with pytest.raises(ValueError, match="cannot be asked for with a prefill"):
        backend.submit(request)
