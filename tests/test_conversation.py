"""Turns, indices, draws, hooks: every row of the table of terms, on the tiny model and on scripts."""

from itertools import pairwise

import pytest

from interlens import (
    AutoModelParticipant,
    Capture,
    ContextItem,
    Conversation,
    DropOldest,
    FunctionParticipant,
    Message,
    RandomSpeaker,
    ScriptedParticipant,
    SlidingWindow,
    Span,
    Summarize,
    TokenBudget,
    TurnStopCondition,
    approve,
    deny,
    edit,
)
from interlens.errors import ContextOverflow, ModelError, ParticipantError
from interlens.models import ModelParticipant
from interlens.testing import ScriptedBackend


def tiny(name, **settings):
    return AutoModelParticipant.from_pretrained("tiny", name=name, **({"max_new_tokens": 8} | settings))


def pair(**recipe):
    return Conversation([tiny("alice"), tiny("bob")], **({"shared_context": "Tea."} | recipe))


def script(name, words="one two three four five six", **settings):
    return ScriptedParticipant(name, [f"{name} {i} {words}" for i in range(20)], **settings)


def named(model, **settings):
    return AutoModelParticipant.from_pretrained(model, name="a", **settings)


def begun(*messages):
    return Conversation.from_messages(messages, [script("a")])


def texts(conv):
    return [m.content for m in conv.transcript]


# -- terms


def test_shared_context_is_message_zero_and_not_a_turn():
    conv = pair()
    assert (conv.transcript[0].author, conv.transcript[0].content) == ("moderator", "Tea.")
    assert conv.n_turns == 0
    conv.run(2)
    assert [m.metadata.get("turn") for m in conv.transcript] == [None, 0, 1]


def test_turn_ordinals_skip_the_moderator():
    conv = pair()
    conv.run(1)
    conv.say("moderator", "Go on.")
    conv.run(1)
    assert [e.turn for e in conv.entries()] == [None, 0, None, 1]
    assert conv.transcript[-1].metadata["turn"] == 1


def test_run_takes_further_turns_and_the_speaker_follows():
    conv = Conversation([script("a"), script("b"), script("c")])
    conv.run(3)
    conv.run(1)
    assert [m.author for m in conv.transcript] == ["a", "b", "c", "a"]
    conv.run(1, first="c")
    assert conv.transcript[-1].author == "c"
    conv.run(1)
    assert conv.transcript[-1].author == "a"


def test_the_speaker_follows_after_save_load_rewind_and_branch(tmp_path):
    conv = Conversation([script("a"), script("b"), script("c")], shared_context="Hm.")
    conv.run(2)
    conv.save(tmp_path)
    loaded = Conversation.load(tmp_path)
    assert loaded.run(1)[-1].author == "c"
    assert conv.branch().run(1)[-1].author == "c"
    assert conv.branch_from(1).run(1)[-1].author == "b"
    conv.rewind(to=0)
    assert conv.run(1)[-1].author == "a"


def test_rewind_keeps_its_message_and_negative_counts_from_the_end():
    conv = Conversation([script("a"), script("b")])
    conv.run(4)
    assert len(conv.branch().rewind(to=1).transcript) == 2
    assert len(conv.branch().rewind(to=-2).transcript) == 3
    assert len(conv.branch_from(conv.transcript[2]).transcript) == 3
    with pytest.raises(IndexError, match="4 messages"):
        conv.rewind(to=9)


def test_edit_replaces_and_forgets_what_followed():
    conv = Conversation([script("a"), script("b")])
    conv.run(4)
    kept = conv.branch()
    conv.edit(1, "other words")
    assert texts(conv) == [conv.transcript[0].content, "other words"]
    kept.edit(1, "other words", keep_later=True)
    assert len(kept.transcript) == 4
    assert kept.transcript[1].content == "other words"


def test_editing_history_gives_what_a_fresh_conversation_gives():
    conv = pair()
    conv.run(3)
    conv.edit(1, "Quite other words.")
    reply = conv.step("bob")
    fresh = pair()
    fresh.say("alice", "Quite other words.")
    assert fresh.step("bob").token_ids == reply.token_ids


def test_a_denied_turn_counts_and_leaves_no_message():
    conv = Conversation(
        [script("a"), script("b")], message_hooks=lambda m, c: deny("no") if m.author == "a" else None
    )
    conv.run(4)
    assert [m.author for m in conv.transcript] == ["b", "b"]
    assert [d["author"] for d in conv.denied] == ["a", "a"]
    spent = sum(m.metadata["n_tokens"] for m in conv.transcript)
    assert conv.tokens_generated == spent + sum(d["n_tokens"] for d in conv.denied)


def test_a_denied_speaker_draws_anew():
    seen = []

    def once(message, conv):
        seen.append(message.token_ids)
        return deny() if len(seen) < 3 else approve()

    conv = pair(message_hooks=once)
    assert conv.step("alice") is None
    assert conv.step("alice") is None
    assert conv.step("alice") is not None
    assert len(set(seen)) == 3


def test_an_edit_by_a_hook_is_what_others_read():
    conv = pair(message_hooks=lambda m, c: edit("Said otherwise."))
    message = conv.step("alice")
    assert message.content == "Said otherwise."
    assert message.metadata["edited"]["from"] != "Said otherwise."
    assert "Said otherwise." in conv.view("bob").text
    assert "Said otherwise." in conv.view("alice").text


def test_a_hook_that_answers_nonsense_is_named():
    conv = pair(message_hooks=lambda m, c: "yes")
    with pytest.raises(TypeError, match="approve"):
        conv.step("alice")
    assert conv.n_turns == 0


# -- chance


def test_same_seed_same_text_other_seed_other_text():
    a, b, c = pair(), pair(), pair().seed(1)
    a.run(4), b.run(4), c.run(4)
    assert texts(a) == texts(b)
    assert texts(a)[1:] != texts(c)[1:]


def test_names_do_not_enter_the_draws():
    one = Conversation([tiny("alice"), tiny("bob")], shared_context="Tea.")
    other = Conversation([tiny("x"), tiny("y")], shared_context="Tea.")
    one.run(4), other.run(4)
    assert [m.token_ids for m in one.transcript] == [m.token_ids for m in other.transcript]


def test_a_participants_seed_is_mixed_in():
    plain, seeded = pair(), Conversation([tiny("alice", seed=3), tiny("bob")], shared_context="Tea.")
    assert plain.step("alice").token_ids != seeded.step("alice").token_ids


def test_branches_keep_the_stream_unless_reseeded():
    conv = pair()
    conv.run(2)
    same, also, other = conv.branch(), conv.branch(), conv.branch(reseed=1)
    assert same.step("alice").token_ids == also.step("alice").token_ids
    assert other.step("alice").token_ids != same.transcript[-1].token_ids
    again = conv.branch(reseed=1)
    assert again.step("alice").token_ids == other.transcript[-1].token_ids


def test_branches_share_nothing_mutable():
    conv = pair()
    conv.run(2)
    branch = conv.branch()
    branch.run(1)
    branch.sample("alice")
    assert len(conv.transcript) == 3
    other = conv.branch_from(-1)
    assert conv.sample("bob").token_ids == other.sample("bob", n=2)[0].token_ids


def test_samples_are_successive_draws_and_the_same_on_a_rerun():
    first, second = pair(), pair()
    one_by_one = [first.sample("alice").token_ids for _ in range(4)]
    assert len(set(one_by_one)) == 4
    assert [m.token_ids for m in second.sample("alice", n=4)] == one_by_one
    assert len(first.transcript) == 1
    both = pair().sample(["alice", "bob"], n=2)
    assert set(both) == {"alice", "bob"}
    assert [m.token_ids for m in both["alice"]] == one_by_one[:2]


def test_sample_may_be_asked_something_that_is_not_committed():
    conv = pair()
    conv.run(1)
    asked = conv.sample("bob", "One word?")
    assert asked.author == "bob"
    assert len(conv.transcript) == 2
    assert asked.token_ids != pair().branch().sample("bob", "Other?").token_ids


def test_random_speaker_follows_the_seed():
    def authors(seed):
        people = [script("a"), script("b"), script("c")]
        return [m.author for m in Conversation(people, next_speaker=RandomSpeaker()).seed(seed).run(12)]

    assert authors(1) == authors(1)
    assert len({tuple(authors(s)) for s in range(4)}) > 1
    assert all(a != b for a, b in zip(authors(1), authors(1)[1:], strict=False))


def test_a_function_chooses_the_next_speaker():
    people = [script("a"), script("b")]
    assert [m.author for m in Conversation(people, next_speaker=lambda c: "b").run(3)] == ["b"] * 3
    with pytest.raises(ValueError, match="nobody here is called"):
        Conversation(people, next_speaker=lambda c: "zoe").run(1)


# -- streams, capture, settings


def test_stream_is_the_same_turn_as_step():
    streamed, stepped = pair(), pair()
    pieces = list(streamed.stream("alice"))
    message = stepped.step("alice")
    assert "".join(pieces) == message.content
    assert streamed.transcript == stepped.transcript


def test_closing_a_stream_cancels_the_turn():
    conv = Conversation([tiny("alice", max_new_tokens=200, logit_bias={2: -100.0})])
    pieces = conv.stream("alice")
    next(pieces)
    pieces.close()
    assert len(conv.transcript) == 0
    assert conv.step("alice", max_new_tokens=4).metadata["n_tokens"] == 4


def test_captures_by_step_block_and_recipe_agree():
    span = Span(phase="generated")
    by_step = pair().step("alice", capture=Capture(layers=(0, -1), span=span))
    block = pair()
    with block.capture(layers=(0, 1), span=span) as acts:
        block.step("alice")
        block.sample("bob")
    hooked = pair().hook(Capture(layers=(0, 1), span=span), speaker="alice", turns=slice(0, 1))
    by_recipe = hooked.step("alice")
    for layer in (0, 1):
        a = by_step.activations.at(layer=layer)
        assert a.equal(acts.at(layer=layer, turn=0, participant="alice"))
        assert a.equal(by_recipe.activations.at(layer=layer))
        assert len(a) == by_step.metadata["n_tokens"]
    assert hooked.step("bob").activations is None
    assert block.taps == []
    assert by_step.token_ids == by_recipe.token_ids == block.transcript[-1].token_ids


def test_samples_are_captured_inside_a_block():
    conv = pair()
    with conv.capture(layers=1) as acts:
        conv.sample("alice", n=2)
    assert len(acts) == 2


def test_settings_of_one_turn_hold_for_that_turn():
    conv = pair()
    greedy = conv.step("alice", temperature=0.0, max_new_tokens=3)
    assert greedy.metadata["sampling"]["temperature"] == 0.0
    assert greedy.metadata["n_tokens"] <= 3
    assert conv.step("bob").metadata["sampling"]["temperature"] == 0.7
    with pytest.raises(TypeError, match="temperature"):
        conv.step("alice", temprature=0.1)


def test_logprobs_are_recorded_and_finite():
    message = pair().step("alice", logprobs=2)
    n = message.metadata["n_tokens"]
    assert len(message.metadata["logprobs"]) == len(message.metadata["entropy"]) == n
    assert all(x <= 0 for x in message.metadata["logprobs"])
    assert all(len(top) == 2 for top in message.metadata["top_logprobs"])


# -- prompts


def test_prompts_extend_what_was_given_and_said():
    conv = pair()
    conv.run(6)
    for name in ("alice", "bob"):
        own = [m for m in conv.transcript if m.author == name]
        for before, after in pairwise(own):
            told = before.prompt_ids + before.token_ids
            assert after.prompt_ids[: len(told)] == told
            assert "diverges" not in after.metadata
            assert after.metadata["reused_tokens"] >= len(told) - 1
    assert conv.view("alice").ids[: len(own[0].prompt_ids)] != ()


def test_a_view_is_what_the_next_turn_is_given():
    conv = pair()
    conv.run(3)
    seen = conv.view("bob").ids
    assert conv.step("bob").prompt_ids == seen


def test_private_context_and_prompts_are_seen_by_their_owner_alone():
    alice = tiny("alice", system_prompt="You are A.", private_context=(ContextItem("The code is 42."),))
    bob = tiny("bob", private_context=(ContextItem("Look left.", at=1),))
    conv = Conversation([alice, bob], shared_context="Tea.", shared_system_prompt="All be kind.")
    conv.run(2)
    a, b = conv.view("alice").text, conv.view("bob").text
    assert all(words in a for words in ("You are A.", "42", "be kind"))
    assert "be kind" in b
    assert not any(words in b for words in ("You are A.", "42"))
    assert ("Look left." in a, "Look left." in b) == (False, True)


def test_solo_turns_are_separated_by_scaffold():
    conv = Conversation([tiny("solo")], shared_context="Count.", continue_prompt="And on.")
    conv.run(3)
    view = conv.view("solo")
    scaffolds = [s for s in view.segments if s.text == "And on."]
    assert len(scaffolds) == 3
    assert all(s.speaker is None and s.part == "scaffold" for s in scaffolds)
    assert "And on." not in texts(conv)


def test_more_than_two_speakers_carry_names():
    conv = Conversation([tiny("a"), tiny("b"), tiny("c")])
    conv.run(3)
    assert "b: " in conv.view("a").text
    assert "a: " not in Conversation([tiny("a"), tiny("b")]).view("a").text


# -- context


def test_a_context_that_cannot_fit_says_what_to_do():
    conv = pair(context_limit=30)
    with pytest.raises(ContextOverflow, match=r"alice's prompt has \d+ tokens.*DropOldest"):
        conv.run(2)


@pytest.mark.parametrize("policy", [DropOldest(), SlidingWindow(2)])
def test_policies_keep_the_prompt_and_reply_inside_the_limit(policy):
    conv = pair(context_policy=policy, context_limit=150)
    conv.run(12)
    for message in conv.transcript[1:]:
        assert len(message.prompt_ids) + message.metadata["sampling"]["max_new_tokens"] <= 150
    assert any("diverges" in m.metadata for m in conv.transcript)
    assert "Tea." in conv.view("alice").text


def test_summaries_stand_for_older_messages():
    asked = []

    def shorten(text):
        asked.append(text)
        return "They spoke of tea."

    conv = pair(context_policy=Summarize(shorten), context_limit=220)
    conv.run(12)
    assert asked
    assert "They spoke of tea." in conv.view("alice").text
    assert all(len(m.prompt_ids) + 8 <= 220 for m in conv.transcript[1:])


def test_a_participant_may_summarise():
    conv = pair(context_policy=Summarize(script("writer", "short")), context_limit=180)
    conv.run(10)
    assert "writer 0 short" in conv.view("alice").text


# -- tools


def test_a_tool_loop_counts_all_its_tokens_and_shows_its_trail():
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    replies = iter(
        ['<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>', "It is sunny."]
    )
    from interlens.models import ModelParticipant
    from interlens.testing import ScriptedBackend

    backend = ScriptedBackend(lambda request: next(replies))
    bot = ModelParticipant(name="bot", backend=backend, tools=(weather,))
    conv = Conversation([bot], shared_context="Weather?")
    message = conv.step("bot")
    assert message.content == "It is sunny."
    assert message.metadata["n_tokens"] == sum(len(t.split(" ")) + 1 for t in ("a b c d e", "a b c")) == 10
    assert message.metadata["tool_trail"][0]["results"] == ["sunny in Bern"]
    assert [m["role"] for m in backend.requests[1].prompt.messages] == ["user", "assistant", "tool"]


def test_a_tool_loop_ends_at_its_limit():
    def echo(x: str) -> str:
        """Echo."""
        return x

    backend = ScriptedBackend(
        lambda request: '<tool_call>{"name": "echo", "arguments": {"x": "1"}}</tool_call>'
    )
    bot = ModelParticipant(name="bot", backend=backend, tools=(echo,), max_tool_iters=2)
    message = Conversation([bot], shared_context="Go.").step("bot")
    assert len(backend.requests) == 3
    assert message.metadata["finish"] == "tools"


# -- budgets


def test_a_budget_is_spent_to_the_token():
    people = [script("a"), script("b")]  # 8 words and the end: 9 tokens a turn
    conv = Conversation(people)
    conv.run(until=TokenBudget(per_conversation=23))
    assert conv.tokens_generated == 23
    assert [m.metadata["n_tokens"] for m in conv.transcript] == [9, 9, 5]
    assert conv.transcript[-1].metadata["finish"] == "length"


def test_a_budget_counts_inherited_turns_and_never_raises_a_cap():
    conv = Conversation([script("a", max_new_tokens=4), script("b")])
    conv.run(2)
    conv.run(until=TokenBudget(per_conversation=20, per_turn=6))
    assert conv.tokens_generated == 20
    assert all(m.metadata["n_tokens"] <= (4 if m.author == "a" else 9) for m in conv.transcript)


def test_an_ambient_budget_is_read_when_the_run_begins():
    conv = Conversation([script("a"), script("b")])
    with TokenBudget(per_conversation=15):
        conv.run(10)
    assert conv.tokens_generated == 15


def test_stops_combine():
    conv = Conversation([script("a"), script("b")])
    conv.run(until=TurnStopCondition(3) | TokenBudget(per_conversation=1000))
    assert conv.n_turns == 3
    conv.run(until=TurnStopCondition(1) & TurnStopCondition(5))
    assert conv.n_turns == 5


# -- bad input


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: Conversation([]), ValueError, "at least one participant"),
        (
            lambda: Conversation([script("a"), script("a")]),
            ValueError,
            "both|two participants are called 'a'",
        ),
        (lambda: Conversation([script("moderator")]), ValueError, "moderator"),
        (lambda: Conversation(["alice"]), TypeError, "from_pretrained"),
        (lambda: Conversation([script("a")], context_policy="drop"), ValueError, "DropOldest"),
        (lambda: Conversation([script("a")], reasoning_visibility="show"), ValueError, '"strip"'),
        (lambda: Conversation([script("a")], execution_mode="fast"), ValueError, "deterministic"),
        (lambda: pair().set(temprature=1), TypeError, "There are:"),
        (lambda: pair().run(), ValueError, "run\\(turns=6\\)"),
        (lambda: pair().run(2, first="carol"), ValueError, "alice, bob"),
        (lambda: pair().step("carol"), ValueError, "alice, bob"),
        (lambda: pair().step(7), IndexError, "there are 2"),
        (lambda: pair().step("alice", capture=Capture(layers=9)), ValueError, r"it has 2 layers \(0-1\)"),
        (lambda: Capture("resid_pst"), ValueError, "resid_post"),
        (lambda: tiny("a", temperature=-1), ValueError, "temperature must be 0 or more"),
        (lambda: tiny("a", top_p=0), ValueError, "top_p"),
        (lambda: tiny("a", temprature=1), TypeError, '"temperature"'),
        (lambda: tiny("a", stop=("",)), ValueError, "empty stop"),
        (lambda: tiny("a", thinking=True).template, ValueError, "no such switch"),
        (lambda: tiny(""), ValueError, "needs a name"),
        (lambda: AutoModelParticipant.from_pretrained("./nowhere", name="a"), ModelError, "no model folder"),
        (
            lambda: AutoModelParticipant.from_pretrained("no-such/model", name="a"),
            ModelError,
            "cannot be read",
        ),
        (lambda: AutoModelParticipant.from_pretrained("tiny", name="a", dtype="fp32"), ValueError, "float32"),
        (
            lambda: AutoModelParticipant.from_pretrained("tiny", name="a", backend="trt"),
            ValueError,
            "huggingface",
        ),
        (lambda: Conversation([script("a")]).step("a", capture=Capture()), ValueError, "no model"),
        (lambda: Conversation([script("a")]).step("a", logprobs=True), ValueError, "no model"),
        (
            lambda: Conversation.from_messages([{"role": "narrator", "content": "x"}], [script("a")]),
            ValueError,
            "role",
        ),
        (lambda: pair().hook(Capture(), speaker="carol"), ValueError, "alice, bob"),
        (lambda: pair().rewind(to="one"), TypeError, "message index"),
        (lambda: pair().sample("alice", n=0), ValueError, "at least 1"),
    ],
)
def test_bad_input_gets_a_sentence(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_a_failed_turn_loses_nothing():
    def breaks(view):
        if len(view.messages) > 2:
            raise RuntimeError("broken")
        return "fine"

    conv = Conversation([FunctionParticipant("f", breaks), script("s")], shared_context="Go.")
    with pytest.raises(RuntimeError, match="broken"):
        conv.run(6)
    assert [m.author for m in conv.transcript] == ["moderator", "f", "s"]
    assert conv.step("s") is not None


def test_a_script_that_ends_says_so():
    conv = Conversation([ScriptedParticipant("a", ["only"])])
    conv.run(1)
    with pytest.raises(ParticipantError, match="1 replies"):
        conv.run(1)


def test_from_messages_takes_authors_and_roles():
    people = [script("a"), script("b")]
    by_role = Conversation.from_messages(
        [
            {"role": "system", "content": "Kind."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Yes?"},
        ],
        people,
    )
    assert [m.author for m in by_role.transcript] == ["b", "a"]
    assert by_role.recipe.shared_system_prompt == "Kind."
    assert by_role.run(1)[-1].author == "b"
    by_author = Conversation.from_messages([{"author": "zoe", "content": "Hello."}], people)
    assert by_author.transcript[0] == Message("zoe", "Hello.")


def test_from_models_gives_each_its_name():
    conv = Conversation.from_models(("tiny", "tiny"), names=("x", "y"), prompt="Speak.", max_new_tokens=4)
    conv.run(2)
    assert [m.author for m in conv.transcript] == ["moderator", "x", "y"]


def test_modifiers_copy_and_read_when_bare():
    conv = pair()
    other = conv.turns(6).name("n").seed(9)
    assert (conv.turns(), conv.name(), conv.seed()) == (None, None, 0)
    assert (other.turns(), other.name(), other.seed()) == (6, "n", 9)
    assert conv.set(shared_context="Coffee.").transcript[0].content == "Coffee."
    assert conv.transcript[0].content == "Tea."


def test_the_end_token_is_footer_in_the_turn_as_in_every_later_view():
    conv = Conversation([tiny("a", logit_bias={2: 5.0}, max_new_tokens=40)], shared_context="Go.")
    message = conv.step("a", capture=Capture(layers=0, span=Span(phase="generated")))
    content = conv.branch_from(0).step("a", capture=Capture(layers=0, span=Span(who="self", part="content")))
    assert message.metadata["finish"] == "eos"
    n = message.metadata["n_tokens"]
    assert len(message.activations.at()) == n
    assert content.activations.at().equal(message.activations.at()[: n - 1])
    later = conv.view("a").positions(Span(who="self", part="content"))
    assert list(content.activations.items[0].positions) == later


def test_two_tools_of_one_name_are_refused():
    def twin(x: str) -> str:
        """One."""
        return x

    with pytest.raises(ValueError, match="two tools are called 'twin'"):
        ModelParticipant(name="b", backend=ScriptedBackend(["x"]), tools=(twin, twin))


# -- said to some


def test_what_is_said_to_one_is_seen_by_no_other():
    conv = Conversation([ScriptedParticipant(n, [f"I am {n}."] * 3) for n in ("ana", "ben")])
    conv.say("moderator", "Welcome.")
    conv.say("moderator", "Your card is a king.", to="ana")
    conv.say("moderator", "Your card is a queen.", to=[conv.participant("ben")])
    conv.run(2)
    seen = {n: [m["content"] for m in conv.view(n).messages] for n in ("ana", "ben")}
    assert seen["ana"] == ["Welcome.", "Your card is a king.", "I am ana.", "I am ben."]
    assert seen["ben"] == ["Welcome.", "Your card is a queen.", "I am ana.", "I am ben.", "Continue."]
    assert [conv.view(n).dropped for n in seen] == [0, 0]
    assert "seen by ana" in conv._repr_html_()
    with pytest.raises(ValueError, match="nobody here is called 'bem'"):
        conv.say("moderator", "x", to="bem")


def test_a_whisper_is_kept_with_the_conversation(tmp_path):
    conv = Conversation([ScriptedParticipant(n, ["Yes."] * 3) for n in ("ana", "ben")])
    conv.say("ben", "Just you and me.", to="ana")
    conv.say("moderator", "Go.")
    loaded = Conversation.load(conv.save(tmp_path / "kept"))
    assert loaded.transcript[0] == conv.transcript[0]
    assert loaded.view("ben").messages[0]["content"] == "Just you and me."  # its author's own
    assert loaded.transcript[0].heard_by("ana")
    assert not loaded.transcript[0].heard_by("cat")
