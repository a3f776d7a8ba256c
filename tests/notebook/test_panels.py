"""The steering panel: both sides come of one request, whatever has become of the conversation since."""

from typing import Any

import pytest
import torch
import traitlets

from interlens import AutoModelParticipant, Capture, Conversation, Direction, Message, Steer, TurnHook
from interlens.chat import tools as calling
from interlens.runner.batched import co_step

NOTE = "taken again, as the conversation is now"
NOTHING = 1e-9


def people(*names: str, **settings: Any) -> list[AutoModelParticipant]:
    settings = {"max_new_tokens": 8, **settings}
    return [AutoModelParticipant.from_pretrained("tiny", name=n, **settings) for n in names]


def direction(seed: int = 0, **place: Any) -> Direction:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return Direction(vector, **(place or {"layer": 1}))


def talk(n: int = 3, **settings: Any) -> Conversation:
    conv = Conversation(people("a", "b", **settings), shared_context="Go.")
    conv.run(n)
    return conv


def again(conv: Conversation, who: str = "a", turn: int | None = None) -> Any:
    """A panel after a push of nothing; both sides are the same."""
    panel = conv.steering(direction(), who, turn=turn)
    panel.strength = NOTHING
    panel.generate()
    assert panel.wait(60)
    assert panel.error == ""
    assert panel.steered_message.token_ids == panel.message.token_ids
    assert panel.steered_message.prompt_ids == panel.message.prompt_ids
    assert panel.steered["content"] == panel.plain["content"]
    return panel


# -- nothing differs but the push


def own(**settings: Any) -> Conversation:
    conv = Conversation(
        people("a", top_k=2, min_p=0.3, presence_penalty=2.0, temperature=1.2), shared_context="Go."
    )
    conv.step("a", top_k=0, min_p=0.0, presence_penalty=0.0, **settings)
    return conv


def stepped() -> Conversation:
    conv = Conversation(people("a", "b"), shared_context="Go.")
    co_step([conv], 2, group_seed=5)
    co_step([conv], 1, group_seed=6)
    return conv


def begun() -> Conversation:
    report = talk(2).turns(1).rollout(n=2, seed=3, progress=False)
    found: Conversation = report.results["rollout_00001"].conversation
    return found


@pytest.mark.parametrize(
    ("conv", "turn"),
    [
        (lambda: talk().seed(5), None),
        (begun, 0),
        (begun, 2),
        (stepped, 0),
        (stepped, 2),
        (own, 0),
        (lambda: own(logit_bias={}), 0),
        (lambda: own(logit_bias={50: 9.0}), 0),
    ],
)
def test_a_turn_tells_how_it_is_taken_again(conv: Any, turn: int | None):
    """Another seed by now, or a setting that was turned off for a turn: the message says so of itself."""
    found = conv()
    panel = again(found, turn=turn)
    assert any(m is panel.message for m in found.transcript)
    assert NOTE not in panel.plain["note"]


@pytest.mark.parametrize(
    "change",
    [
        lambda conv: conv.branch(reseed=7),
        lambda conv: conv.set(shared_system_prompt="Be brief."),
        lambda conv: conv.hook(Steer(direction(3), coef=30.0)),
        lambda conv: conv.set(participants=people("a", "b", stop="u")),
        lambda conv: conv.edit(0, "Entirely different.", keep_later=True) and conv,
    ],
)
def test_a_turn_that_would_be_another_by_now_is_taken_again(change: Any):
    conv = change(talk())
    panel = again(conv)
    assert NOTE in panel.plain["note"]
    assert all(m is not panel.message for m in conv.transcript)
    taken = panel.message
    panel.strength = 2.0
    panel.generate()
    assert panel.wait(60)
    assert panel.message is taken  # once is enough


def test_an_edit_of_its_own_beside_a_hook_is_not_taken_for_the_hooks():
    idle = Conversation(people("a"), shared_context="Go.").hook(Steer(direction()), speaker="a", turns=5)
    idle.step("a", steer=Steer(direction(3), coef=30.0))
    with pytest.raises(ValueError, match="under an edit of its own"):
        idle.steering(direction(), "a")
    busy = Conversation(people("a"), shared_context="Go.").hook(Steer(direction()), speaker="a", turns=0)
    busy.step("a", steer=Steer(direction(3), coef=30.0))
    assert NOTE in again(busy).plain["note"]


class Pushing(TurnHook):
    def before(self, turn: Any) -> Any:
        return [Steer(direction(4), coef=3.0)]


def test_the_edits_of_a_hook_are_made_again():
    for hook in (Pushing(), Steer(direction(4), coef=3.0)):
        conv = Conversation(people("a"), shared_context="Go.").hook(hook)
        conv.run(2)
        assert NOTE not in again(conv).plain["note"]


def test_a_turn_that_remembers_an_edit_is_not_one_that_was_edited():
    conv = Conversation(people("a"), shared_context="Go.")
    conv.step("a", steer=Steer(direction(), coef=2.0))
    for _ in range(2):
        conv.say("moderator", "more")
        conv.step("a")
        assert conv.transcript[-1].edits
        assert NOTE not in again(conv).plain["note"]
    conv.step("a", steer=Steer(direction(), coef=2.0))
    with pytest.raises(ValueError, match="under an edit of its own"):
        conv.steering(direction(), "a")


def test_a_turn_with_tools_has_the_whole_cap_again(monkeypatch: pytest.MonkeyPatch):
    first: list[str] = []

    def parse(text: str, form: Any) -> list[calling.ToolCall]:
        first[:] = first or [text]
        return [calling.ToolCall(name="weather", arguments={"city": "x"})] if text == first[0] else []

    def weather(city: str) -> str:
        "Tell the weather."
        return "rain"

    monkeypatch.setattr(calling, "parse", parse)
    biased = people("a", tools=(weather,), max_new_tokens=24, logit_bias={2: 3.5}, seed=0)
    conv = Conversation(biased, shared_context="Go.", context_limit=2000)
    said = conv.step("a")
    assert said is not None
    assert len(said.metadata["tool_trail"]) == 1
    panel = again(conv)
    assert panel.message is said
    assert panel.steered_message.metadata["sampling"] == said.metadata["sampling"]


def test_a_turn_that_cannot_be_taken_again_says_so():
    conv = talk(1).set(context_limit=12)
    panel = conv.steering(direction(), "a")
    panel.generate()
    assert panel.wait(60)
    assert "ContextOverflow" in panel.error
    assert panel.plain["content"] == conv.transcript[-1].content
    assert panel.steered["note"] == "· broken off"


def test_a_stop_is_heard_before_the_push():
    conv = Conversation(people("a", max_new_tokens=1500, logit_bias={2: -1000.0}), shared_context="Go.")
    conv.step("a", max_new_tokens=1000)
    panel = conv.steering(direction(), "a")
    panel.observe(lambda change: panel.stop(), ["steered"])
    panel.generate()
    assert panel.wait(60)
    assert (panel.error, panel.steered["note"]) == ("", "· broken off")
    assert panel.message is conv.transcript[-1]
    assert panel.steered_message is None


# -- which turn, which direction


def test_a_turn_is_counted_as_the_conversation_counts():
    conv = talk(4)
    assert conv.steering(direction(), "b", turn=1).message is conv.transcript[2]
    assert conv.steering(direction(), "b", turn=3).message is conv.transcript[4]
    assert conv.steering(direction(), "b", turn=-2).message is conv.transcript[2]
    assert conv.steering(direction(), "b").message is conv.transcript[4]
    for turn in (0, 2, 4, -3):
        with pytest.raises(LookupError, match=rf"b has no turn {turn}; it spoke in the turns \[1, 3\]"):
            conv.steering(direction(), "b", turn=turn)


def test_a_direction_brings_its_layer_and_its_site():
    conv = talk(1)
    named = {"low": direction(layer=0), "high": direction(site="mlp_out", layer=-1), "bare": torch.ones(64)}
    panel = conv.steering(named, "a")
    places = []
    for name in ("low", "high", "low", "bare"):
        panel.direction = name
        [place] = panel.edit().addresses(2)
        places.append(place)
    assert places == [("resid_post", 0), ("mlp_out", 1), ("resid_post", 0), ("resid_post", 0)]
    panel.direction, panel.layer = "high", 0
    assert panel.edit().addresses(2) == [("mlp_out", 0)]
    panel.direction = "low"
    panel.direction = "high"
    assert panel.edit().addresses(2) == [("mlp_out", 0)], "a layer that was chosen by hand stays"
    assert conv.steering(direction(layer=-2), "a").layer == 0
    assert conv.steering(direction(site="mlp_out.1"), "a").edit().addresses(2) == [("mlp_out", 1)]


def test_what_a_panel_cannot_push_is_refused_in_words():
    conv = talk(1)
    with pytest.raises(ValueError, match="'given' is at embeddings, and a panel pushes at a site that every"):
        conv.steering(direction(site="embeddings"), "a")
    with pytest.raises(ValueError, match="'x' is at attn_pattern"):
        conv.steering({"up": direction(), "x": direction(site="attn_pattern", layer=0)}, "a")
    with pytest.raises(ValueError, match=r'"resid_post.7" is not in this model: it has 2 layers'):
        conv.steering({"up": direction(), "x": direction(layer=7)}, "a")
    panel = conv.steering({"up": direction(), "down": direction(1)}, "a")
    with pytest.raises(traitlets.TraitError, match=r"no direction 'upp' here: did you mean \"up\""):
        panel.direction = "upp"
    assert panel.direction == "up"


# -- a stored run's numbers


def test_numbers_of_a_stored_run_are_its_own_messages(tmp_path: Any):
    """The conversation of a stored run keeps them while its turns are those that were stored."""
    recipe = Conversation(people("a", "b"), shared_context="Go.").hook(Capture(layers=1)).turns(3)
    result = recipe.rollout(n=1, out_dir=tmp_path, progress=False).results["rollout_00000"]

    def values(conv: Conversation) -> list[bool]:
        tinted = conv.tint(result.activations, along=direction())
        return [any(v is not None for v in shades.values) for shades in tinted.shades]

    def other(conv: Conversation) -> Conversation:
        conv.recipe = conv.recipe.changed(hooks=())  # so that a message has no numbers of its own
        conv.step(conv.names[conv.n_turns % 2], temperature=3.0)
        return conv

    assert values(result.conversation) == [False, True, True, True]
    kept = result.conversation
    kept.edit(1, "Other words.", keep_later=True)
    assert values(kept) == [False, False, True, True]
    short = result.conversation
    short.transcript.cut(2)
    assert values(short) == [False, True]
    assert other(short).kept is None
    long = other(result.conversation)
    assert values(long) == [False, True, True, True, False]
    reset = result.conversation.reset()
    assert reset.kept is None
    for conv in (short, other(reset)):
        with pytest.raises(LookupError, match="no position of any words of this conversation"):
            conv.tint(result.activations, along=direction())
    said = result.conversation
    said.transcript.replace(1, Message("a", "No.", token_ids=(1, 2), metadata={"turn": 0}))
    assert said.kept is None
