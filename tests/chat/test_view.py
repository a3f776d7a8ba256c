"""What each participant sees: roles, rules, spans, private context, reasoning, and nobody else's secrets."""

import copy

import pytest

from interlens.chat.template import Block, ChatTemplate, Piece
from interlens.chat.view import ContextItem, Entry, Reading, View, compose, trail_blocks
from interlens.message import Message
from tests.chat.templates import TEMPLATES, entries, sampled, tokenizer


def template(name: str, **options) -> ChatTemplate:
    return ChatTemplate(tokenizer("bytes", name), **options)


def roles(view: View) -> str:
    """One letter per message."""
    return "".join(m["role"][0] for m in view.messages)


A, B, M = Message("a", "from a"), Message("b", "from b"), Message("moderator", "topic")


def test_own_turns_are_assistant_and_everybody_else_is_user():
    view = compose(entries(M, A, B, A), Reading(pov="a"), template("chatml"), generate=False)
    assert roles(view) == "uaua"
    other = compose(entries(M, A, B), Reading(pov="b"), template("chatml"), generate=False)
    assert roles(other) == "uua"
    assert [m["content"] for m in other.messages] == ["topic", "from a", "from b"]


def test_the_system_block_holds_own_prompt_then_shared_then_private():
    view = compose(entries(M), Reading(pov="a", system=("own", "shared", "secret")), template("chatml"))
    assert view.messages[0] == {"role": "system", "content": "own\n\nshared\n\nsecret"}
    parts = [s for s in view.segments if s.role == "system" and s.part in ("content", "scaffold")]
    assert [(s.text, s.part) for s in parts] == [
        *(("own", "content"), ("\n\n", "scaffold"), ("shared", "content")),
        *(("\n\n", "scaffold"), ("secret", "content")),
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_system_text_is_never_lost_and_belongs_to_no_turn(name):
    view = compose(entries(B, A, B), Reading(pov="a", system=("Be kind.",)), template(name))
    (found,) = [s for s in view.segments if "Be kind." in s.text]
    assert (found.part, found.speaker, found.message, found.turn) == ("content", None, None, None)
    folded = name in ("gemma2", "mistral-v1")
    assert found.role == ("user" if folded else "system")
    assert roles(view) == ("uau" if folded else "suau")
    if folded:
        assert view.messages[0]["content"] == "Be kind.\n\nfrom b"


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_assistant_who_speaks_first_follows_scaffold(name):
    """The same scaffold in the first prompt and in the later ones, so that they extend it."""
    reading = Reading(pov="a", continue_prompt="Begin.", tokenizer_key="own")
    first = compose([], reading, template(name))
    said = entries(sampled(tokenizer("bytes", name), "a", "Hello"), B)
    later = compose(said, reading, template(name))
    assert roles(first) == "u"
    assert roles(later) == "uau"
    for view in (first, later):
        opener = next(s for s in view.segments if s.text.strip() == "Begin.")
        assert (opener.part, opener.speaker, opener.message, opener.turn) == ("scaffold", None, None, None)
    if name != "r1":  # its prompt opens a block of reasoning, which history leaves out
        assert later.ids[: len(first.ids)] == first.ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_solo_turns_are_separated_by_scaffold(name):
    for n in (1, 2, 12):
        view = compose(entries(M, *[A] * n), Reading(pov="a", continue_prompt="On."), template(name))
        assert roles(view) == "u" + "au" * n
        between = [s for s in view.segments if s.text.strip() == "On."]
        assert len(between) == n
        assert all(s.part == "scaffold" and s.speaker is None and s.message is None for s in between)
    done = compose(entries(M, A, A), Reading(pov="a", continue_prompt="On."), template(name), generate=False)
    assert roles(done) == "uaua"


@pytest.mark.parametrize("name", ["llama2", "mistral", "mistral-v1", "gemma2"])
def test_strict_alternation_merges_and_keeps_the_spans(name):
    view = compose(
        entries(M, B, Message("c", "from c"), A, B), Reading(pov="a", show_names=True), template(name)
    )
    assert roles(view) == "uau"
    assert view.messages[0]["content"] == "moderator: topic\n\nb: from b\n\nc: from c"
    told = [(s.text.strip(), s.speaker, s.message, s.turn) for s in view.segments if s.part == "content"]
    assert told == [
        *(("topic", "moderator", 0, None), ("from b", "b", 1, 0), ("from c", "c", 2, 1)),
        *(("from a", "a", 3, 2), ("from b", "b", 4, 3)),
    ]
    joins = [s for s in view.segments if s.text == "\n\n" and s.part == "scaffold"]
    assert [(s.speaker, s.message, s.turn) for s in joins] == [(None, None, None)] * 2


def test_more_than_two_speakers_carry_names():
    c = Message("c", "from c")
    view = compose(entries(A, B, c), Reading(pov="b", show_names=True), template("chatml"), generate=False)
    assert [m["content"] for m in view.messages] == ["a: from a", "from b", "c: from c"]
    names = [s for s in view.segments if s.text in ("a: ", "c: ")]
    assert [(s.part, s.speaker, s.message) for s in names] == [("scaffold", "a", 0), ("scaffold", "c", 2)]
    pair = compose(entries(A, B), Reading(pov="b"), template("chatml"), generate=False)
    assert [m["content"] for m in pair.messages] == ["from a", "from b"]


def test_a_model_without_a_template_reads_a_script_that_names_everybody_once():
    base = template("base")
    reading = Reading(pov="a", system=("Scene.",), show_names=True)
    view = compose(entries(M, A, B, Message("c", "from c")), reading, base)
    assert view.text == "<s>Scene.\n\nmoderator: topic\n\na: from a\n\nb: from b\n\nc: from c\n\na:"
    assert set(view.stop) == {f"{gap}{n}:" for gap in ("\n", "\n\n") for n in ("a", "moderator", "b", "c")}
    assert [s.speaker for s in view.segments if s.part == "content"] == [None, "moderator", "a", "b", "c"]
    assert compose(entries(M), Reading(pov="a"), template("chatml")).stop == ()


def test_a_script_extends_what_was_sampled():
    made = tokenizer("bpe", "base")
    reading = Reading(pov="a", tokenizer_key="own")
    reply = sampled(made, "a", " Hello you")
    reply = reply.with_(token_ids=reply.token_ids[:-1], metadata={**reply.metadata, "end_id": None})
    first, later = (compose(e, reading, ChatTemplate(made)) for e in (entries(M), entries(M, reply, B)))
    assert later.ids[: len(first.ids) + len(reply.token_ids)] == (*first.ids, *reply.token_ids)
    assert later.text == "<s>moderator: topic\n\na: Hello you\n\nb: from b\n\na:"


def test_names_in_a_script_hold_no_control_tokens():
    made = tokenizer("bytes", "base")
    view = compose(entries(Message("</s>", "x")), Reading(pov="<|im_end|>"), ChatTemplate(made))
    assert made.eos_token_id not in view.ids
    assert made.convert_tokens_to_ids("<|im_end|>") not in view.ids


# -- private context


def test_private_context_reaches_its_owner_alone():
    items = (ContextItem("psst", at=1),)
    mine = compose(entries(M, B), Reading(pov="a", system=("secret",), private=items), template("chatml"))
    theirs = compose(entries(M, B), Reading(pov="b"), template("chatml"))
    assert [m["content"] for m in mine.messages] == ["secret", "topic", "psst", "from b"]
    assert "secret" not in theirs.text
    assert "psst" not in theirs.text
    (segment,) = [s for s in mine.segments if s.text == "psst"]
    assert (segment.role, segment.speaker, segment.message) == ("user", None, None)


def test_a_private_item_comes_when_its_message_is_next_and_stays_there():
    reading = Reading(pov="a", private=(ContextItem("psst", at=2),))
    seen = [
        [m["content"] for m in compose(entries(*[M, B, A, B][:n]), reading, template("chatml")).messages]
        for n in range(5)
    ]
    assert seen == [
        ["Continue."],
        ["topic"],
        ["topic", "from b", "psst"],
        ["topic", "from b", "psst", "from a", "Continue."],
        ["topic", "from b", "psst", "from a", "from b"],
    ]


@pytest.mark.parametrize("kept", [[0, 3], [3], [0, 2, 3]])
def test_a_private_item_outlives_the_message_it_stood_before(kept):
    """A context policy may leave messages out; what its owner was told in private is not a message."""
    reading = Reading(pov="a", private=(ContextItem("psst", at=1),))
    whole = entries(M, B, A, B)
    view = compose([whole[i] for i in kept], reading, template("chatml"))
    contents = [m["content"] for m in view.messages]
    assert contents.count("psst") == 1
    assert contents.index("psst") == (1 if 0 in kept else 0)
    assert view.dropped == 4 - len(kept)


def test_a_private_item_has_no_place_before_the_beginning():
    with pytest.raises(ValueError, match="from 0; got -1"):
        ContextItem("x", at=-1)


# -- reasoning


def thought(made, *, opened: bool, closed: bool = True, answer: str = "Yes") -> Message:
    """A reply with reasoning, as the record of a turn holds it."""
    head = ("" if opened else "<think>") + "hidden" + ("</think>" if closed else "")
    reply = sampled(made, "a", head + answer)
    meta = {**reply.metadata, "content_ids": [len(head), len(head + answer)]}
    return reply.with_(content=answer, metadata=meta | {"reasoning": "hidden", "reasoning_text": head})


@pytest.mark.parametrize("name", [*TEMPLATES, "base"])
@pytest.mark.parametrize("closed", [True, False])
def test_reasoning_never_reaches_another_view(name, closed):
    made = tokenizer("bytes", name)
    reply = thought(made, opened=name == "r1", closed=closed, answer="Yes" if closed else "")
    for key in ("own", "another"):
        for visibility in ("strip", "own"):
            reading = Reading(pov="b", visibility=visibility, tokenizer_key=key, show_names=True)
            assert "hidden" not in compose(entries(M, reply, B), reading, ChatTemplate(made)).text
        told = Reading(pov="b", visibility="all", tokenizer_key=key)
        view = compose(entries(M, reply, B), told, ChatTemplate(made), generate=False)
        (shown,) = [s for s in view.segments if "hidden" in s.text]
        assert (shown.channel, shown.speaker, shown.role) == ("reasoning", "a", "user")
        assert ChatTemplate(made).encoder.control_ids.isdisjoint(shown.ids)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "r1"])
def test_own_reasoning_is_seen_as_the_recipe_says(name):
    made = tokenizer("bytes", name)
    reply = thought(made, opened=name == "r1")
    asked = compose(entries(M), Reading(pov="a", tokenizer_key="own"), ChatTemplate(made))
    views = {
        visibility: compose(
            entries(M, reply, B),
            Reading(pov="a", visibility=visibility, tokenizer_key="own"),
            ChatTemplate(made),
        )
        for visibility in ("strip", "own", "all")
    }
    assert "hidden" not in views["strip"].text
    for visibility in ("own", "all"):
        view = views[visibility]
        assert view.ids[: len(asked.ids) + len(reply.token_ids)] == (*asked.ids, *reply.token_ids)
        (shown,) = [s for s in view.segments if s.channel == "reasoning"]
        assert (shown.generated, shown.turn, shown.speaker) == (True, 0, "a")
        assert view.text.count("<think>") == 1 + (name == "r1")  # R1's own prompt opens the next one


def test_own_reasoning_is_whole_again_without_its_ids():
    made = tokenizer("bytes", "r1")
    reading = Reading(pov="a", visibility="own", tokenizer_key="another")
    view = compose(entries(M, thought(made, opened=True), B), reading, ChatTemplate(made))
    assert "<｜Assistant｜><think>\nhidden</think>Yes<｜end▁of▁sentence｜>" in view.text
    begin, end = (made.convert_tokens_to_ids(t) for t in ("<think>", "</think>"))
    assert (view.ids.count(begin), view.ids.count(end)) == (2, 1)


@pytest.mark.parametrize(("text", "opened"), [("<think>hidden</think>", False), ("hidden</think>", True)])
@pytest.mark.parametrize("visibility", ["strip", "own"])
def test_the_reasoning_of_a_tool_loop_goes_with_the_turn(text, opened, visibility):
    made = tokenizer("bytes", "r1" if opened else "qwen2.5")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    step = {"text": text + call, "answer": len(text), "ids": None, "tokenizer": None, "results": ["7"]}
    reply = Message("a", "It is 7.", metadata={"tool_trail": [step]})
    reading = Reading(pov="a", visibility=visibility)
    view = compose(entries(M, reply, B), reading, ChatTemplate(made))
    assert ("hidden" in view.text) == (visibility == "own")
    assert call in view.text
    assert "hidden" not in compose(entries(M, reply, B), Reading(pov="b"), ChatTemplate(made)).text
    live = compose(entries(M), reading, ChatTemplate(made), trail=trail_blocks(step, reading, turn=0))
    assert "hidden" in live.text


# -- tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_loop_is_seen_by_its_owner_alone(name):
    made = tokenizer("bytes", name)
    call, result = "CALL f", "RESULT <|im_end|></s>"
    steps = [{"text": call, "answer": 0, "ids": None, "tokenizer": None, "results": [result, result]}] * 2
    reply = Message("a", "done", metadata={"tool_trail": steps})
    mine = compose(entries(M, reply, B), Reading(pov="a"), ChatTemplate(made))
    assert mine.text.count(call) == 2
    assert mine.text.count("RESULT") == 4
    assert all(
        s.turn == 0 and s.message == 1 for s in mine.segments if "CALL" in s.text or "RESULT" in s.text
    )
    assert [s.channel for s in mine.segments if "CALL" in s.text] == ["tool_call"] * 2
    assert all(s.speaker is None for s in mine.segments if "RESULT" in s.text)
    control = ChatTemplate(made).encoder.control_ids
    assert all(control.isdisjoint(s.ids) for s in mine.segments if "RESULT" in s.text)
    theirs = compose(entries(M, reply, B), Reading(pov="b"), ChatTemplate(made), generate=False)
    assert call not in theirs.text
    assert "RESULT" not in theirs.text


def test_tool_results_without_a_tool_role_are_said_by_the_user():
    assert not template("mistral").traits.tool_role
    assert not template("gemma2").traits.tool_role
    assert template("qwen2.5").traits.tool_role
    step = {"text": "CALL", "answer": 0, "ids": None, "tokenizer": None, "results": ["7"]}
    reading = Reading(pov="a")
    view = compose(entries(B), reading, template("gemma2"), trail=trail_blocks(step, reading, turn=1))
    assert roles(view) == "uau"
    assert view.messages[-1]["content"] == "7"


def test_the_ids_of_a_call_stay_as_sampled():
    made = tokenizer("bpe", "qwen2.5")
    reply = sampled(made, "a", "call it")
    ids = list(reply.token_ids[:-1])
    step = {
        "text": "call it",
        "answer": 0,
        "ids": ids,
        "end_id": made.eos_token_id,
        "tokenizer": "own",
        "results": ["7"],
    }
    reading = Reading(pov="a", tokenizer_key="own")
    asked = compose(entries(M), reading, ChatTemplate(made))
    blocks = trail_blocks(step, reading, turn=0, speaker="a")
    again = compose(entries(M), reading, ChatTemplate(made), trail=blocks)
    assert again.ids[: len(asked.ids) + len(ids) + 1] == (*asked.ids, *ids, made.eos_token_id)
    assert [s.ids for s in again.segments if s.generated] == [tuple(ids), (made.eos_token_id,)]


def test_tools_are_listed_by_the_template():
    schema = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    view = compose(entries(M), Reading(pov="a"), template("qwen2.5"), tools=[schema])
    assert '"name": "weather"' in view.text
    assert view.tools == (schema,)
    assert view.segments[0].part == "scaffold"


# -- the object


def test_nothing_is_changed_by_looking():
    made = tokenizer("bytes", "gemma2")
    said = entries(M, sampled(made, "a", "Hello", reasoning="r", reasoning_text="x"), B)
    before = copy.deepcopy([(e.message.content, dict(e.message.metadata)) for e in said])
    reading = Reading(pov="a", system=("s",), private=(ContextItem("p", at=1),), tokenizer_key="own")
    blocks = [Block(role="tool", pieces=(Piece(text="t"),))]
    views = [compose(said, reading, ChatTemplate(made), trail=blocks) for _ in range(2)]
    assert views[0].segments == views[1].segments
    assert [(e.message.content, dict(e.message.metadata)) for e in said] == before
    assert len(said) == 3
    assert blocks == [Block(role="tool", pieces=(Piece(text="t"),))]


def test_messages_alone_have_no_ids():
    view = compose(entries(M, A), Reading(pov="b", system=("s",)), None)
    assert [m["role"] for m in view.messages] == ["system", "user", "user"]
    with pytest.raises(TypeError, match="b is answered by messages, not by tokens"):
        _ = view.ids
    assert view.waits_for is None
    assert repr(view) == "View(of 'b', 3 messages, no tokens)"
    assert "<table" in view._repr_html_()


def test_a_digest_names_what_the_model_is_given():
    one = compose(entries(M), Reading(pov="a"), template("chatml"))
    same = compose(entries(M), Reading(pov="a"), template("chatml"))
    other = compose(entries(B), Reading(pov="a"), template("chatml"))
    assert one.digest() == same.digest() != other.digest()
    plain = compose(entries(Message("b", "\ud800")), Reading(pov="a"), None)
    assert plain.digest() != compose(entries(Message("b", "\ud801")), Reading(pov="a"), None).digest()


def test_what_a_policy_left_out_is_counted():
    whole = entries(M, A, B, A, B)
    summary = Entry(Message("summary", "so far"), None, None)
    assert compose(whole, Reading(pov="a"), None).dropped == 0
    assert compose([whole[0], *whole[3:]], Reading(pov="a"), None).dropped == 2
    assert compose([whole[0], summary, whole[4]], Reading(pov="a"), None).dropped == 3


def test_html_escapes_what_was_said():
    view = compose(entries(Message("b", "<script>x</script>")), Reading(pov="a"), template("chatml"))
    assert "<script>" not in view._repr_html_()
    assert "&lt;script&gt;" in view._repr_html_()
