"""Two models in one game: each sees what the game shows it, and nothing of the other."""

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from interlens import AutoModelParticipant, Capture, Message
from interlens.backends import HuggingFaceBackend, ScriptedBackend
from interlens.evaluation import Environment, Signal, StepResult, TextArena, TrajectoryRunner
from interlens.evaluation.runner import SegmentedTrajectoryRunner
from interlens.evaluation.segments import TokenContinuation
from interlens.testing import tiny

with_arena = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")


@dataclass(frozen=True)
class Heap:
    left: int
    mover: int
    last: str = ""


class Nim(Environment):
    """Take one, two or three; whoever takes the last wins. Each player has a secret word."""

    name, players, max_steps = "nim", 2, 12

    def __len__(self) -> int:
        return 8

    def reset(self, *, task: int, seed: int) -> Heap:
        return Heap(5 + task, 0)

    def current_player(self, state: Heap) -> int:
        return state.mover

    def messages(self, state: Heap) -> list[dict[str, Any]]:
        word = ("apple", "pear")[state.mover]
        return [{"role": "user", "content": f"Your word is {word}.{state.last} {state.left} are left."}]

    def step(self, state: Heap, action: str) -> StepResult:
        taken = min(int(action.split()[0]), state.left)
        left = state.left - taken
        won = [Signal("success", float(left == 0 and state.mover == 0))]
        after = Heap(left, 1 - state.mover, f" The other took {taken}.")
        return StepResult(state=after, signals=won, terminated=left == 0)


def left_of(request: Any) -> int:
    return int(request.prompt.messages[-1]["content"].split()[-3])


def perfect() -> ScriptedBackend:
    return ScriptedBackend(lambda request: f"{left_of(request) % 4 or 1} because of a plan")


def greedy() -> ScriptedBackend:
    return ScriptedBackend(lambda request: "1 slowly")


def plain_loop(task: int) -> list[int]:
    """The slow reference: what is taken, by a loop without a runner."""
    heap, taken = 5 + task, []
    while heap:
        taken.append((heap % 4 or 1) if len(taken) % 2 == 0 else 1)
        taken[-1] = min(taken[-1], heap)
        heap -= taken[-1]
    return taken


def test_the_moves_are_those_of_a_plain_loop():
    result = TrajectoryRunner(Nim(), {"ana": perfect(), "ben": greedy()}).run_batch()
    for trajectory in result:
        taken = plain_loop(trajectory.task)
        assert [int(s.action[0]) for s in trajectory.steps] == taken
        assert [s.message.author for s in trajectory.steps] == [
            ("ana", "ben")[i % 2] for i in range(len(taken))
        ]
        assert trajectory.success == (len(taken) % 2 == 1)


def test_neither_sees_what_is_the_others():
    [trajectory] = TrajectoryRunner(Nim(), {"ana": perfect(), "ben": greedy()}).run_batch([2])
    conv = trajectory.conversation
    for name, own, other in (("ana", "apple", "pear"), ("ben", "pear", "apple")):
        seen = [m["content"] for m in conv.view(name).messages]
        assert any(own in text for text in seen)
        assert not any(other in text for text in seen)
        theirs = "slowly" if name == "ana" else "plan"
        assert not any(theirs in text for text in seen)
        assert not any(text.startswith(("ana:", "ben:", "environment:")) for text in seen)
        assert conv.view(name).dropped == 0


def test_players_of_one_model_are_asked_together_and_as_alone():
    """Batched with 7 other games or alone: the same words, and the same prompts."""
    backend = HuggingFaceBackend(*tiny(), name="tiny")

    class Chat(Nim):
        def step(self, state: Heap, action: str) -> StepResult:
            heard = replace(state, mover=1 - state.mover, left=state.left - 1, last=f" They said {action!r}.")
            return StepResult(state=heard, terminated=heard.left == 0)

    def runner() -> TrajectoryRunner:
        return TrajectoryRunner(Chat(), [backend, backend], {"max_tokens": 5, "temperature": 1.0})

    together = runner().run_batch()
    for trajectory in together:
        alone = runner().run_trajectory(trajectory.task)
        assert [m.token_ids for m in alone.transcript] == [m.token_ids for m in trajectory.transcript]
        assert [m.prompt_ids for m in alone.transcript] == [m.prompt_ids for m in trajectory.transcript]
    assert len({m.author for m in together[0].transcript}) == 3


def test_one_player_is_looked_into():
    class Chat(Nim):
        def step(self, state: Heap, action: str) -> StepResult:
            left = state.left - 1
            return StepResult(state=replace(state, mover=1 - state.mover, left=left), terminated=left == 0)

    backend = HuggingFaceBackend(*tiny(), name="tiny")
    runner = TrajectoryRunner(Chat(), {"ana": backend, "ben": backend}, {"max_tokens": 4})
    [found] = runner.hook(Capture(layers=[0]), player="ana").run_batch([0])
    caught = {m.author: m.activations is not None for m in found.transcript}
    assert caught == {"environment": False, "ana": True, "ben": False}
    with pytest.raises(ValueError, match="nobody here is called 'bem'"):
        runner.hook(Capture(layers=[0]), player="bem")


def test_a_game_goes_on_where_it_ended(tmp_path: Path):
    runner = TrajectoryRunner(Nim(), {"ana": perfect(), "ben": greedy()})
    first = runner.run_batch(out_dir=tmp_path)
    again = TrajectoryRunner(Nim(), {"ana": perfect(), "ben": greedy()}).run_batch(out_dir=tmp_path)
    assert len(again.report.skipped) == 8
    assert [[m.identity() for m in t.transcript] for t in first] == [
        [m.identity() for m in t.transcript] for t in again
    ]
    swapped = TrajectoryRunner(Nim(), {"ben": greedy(), "ana": perfect()})
    with pytest.raises(Exception, match="participants"):
        swapped.run_batch(out_dir=tmp_path)


def test_branches_and_states():
    runner = TrajectoryRunner(Nim(), {"ana": perfect(), "ben": greedy()})
    [trajectory] = runner.run_batch([2])
    [other] = runner.branch(trajectory, 1, action="3 instead")
    assert [s.action for s in other.steps][:2] == [trajectory.steps[0].action, "3 instead"]
    assert [s.message.author for s in other.steps][:3] == ["ana", "ben", "ana"]
    assert other.steps[1].forced
    [late] = runner.run_batch_from_states([Heap(2, 1)])
    assert [s.message.author for s in late.steps] == ["ben", "ana"]
    [counter] = runner.run_batch_from_state_actions([(Heap(2, 1), "2 all")])
    assert [(s.message.author, s.action) for s in counter.steps] == [("ben", "2 all")]


def test_turns_in_pieces():
    backend = HuggingFaceBackend(*tiny(), name="tiny")

    class Talk(Nim):
        def step(self, state: Heap, action: str) -> StepResult:
            return StepResult(state=replace(state, mover=1 - state.mover, left=state.left - 1))

    runner = SegmentedTrajectoryRunner(
        Talk(), [backend, backend], {"max_tokens": 4}, continuation=TokenContinuation(2), max_steps=3
    )
    found = runner.run_trajectory(0)
    assert [s.message.author for s in found.steps] == ["player_0", "player_1", "player_0"]


@pytest.mark.parametrize("backends", [perfect(), [perfect()], [perfect()] * 3])
def test_every_player_needs_a_model(backends: Any):
    with pytest.raises(ValueError, match=r"nim has 2 player\(s\), and"):
        TrajectoryRunner(Nim(), backends)


def test_one_player_has_one_model():
    class Alone(Nim):
        players = 1

    with pytest.raises(ValueError, match=r"1 player\(s\), and 2 backend"):
        TrajectoryRunner(Alone(), [perfect(), perfect()])


def test_participants_keep_their_names_and_prompts():
    ana = AutoModelParticipant.from_pretrained("tiny", name="ana", system_prompt="Be bold.", max_new_tokens=3)
    ben = AutoModelParticipant.from_pretrained("tiny", name="ben", max_new_tokens=3)
    runner = TrajectoryRunner(Nim(), [ana, ben])
    assert [m.name for m in runner.models] == ["ana", "ben"]
    assert [m.system_prompt for m in runner.models] == ["Be bold.", None]
    with pytest.raises(ValueError, match="two players are called 'ana'"):
        TrajectoryRunner(Nim(), [ana, ana])


def test_an_environment_that_names_nobody_or_tells_all_is_a_failure_of_its_own():
    class Wrong(Nim):
        def current_player(self, state: Heap) -> int:
            return 2

    class Loud(Nim):
        def messages(self, state: Heap) -> list[dict[str, Any]]:
            return [{"role": "system", "content": "a secret"}]

    for world, said in ((Wrong(), "lets player 2 act"), (Loud(), "would be seen by all players")):
        [found] = TrajectoryRunner(world, [perfect(), greedy()]).run_batch([0])
        assert found.outcome == "failed"
        assert said in str(found.error)


# -- textarena


def moves(*said: str) -> ScriptedBackend:
    left = iter(said)
    return ScriptedBackend(lambda request: next(left))


@with_arena
def test_three_in_a_row():
    players = {"ana": moves("I take the middle: [4]", "[0]", "[8]"), "ben": moves("[1], my plan is 2", "[2]")}
    [found] = TrajectoryRunner(TextArena("TicTacToe-v0"), players).run_batch([0])
    assert (found.outcome, found.success, found.reward) == ("done", True, 1.0)
    assert found.signals["reward_1"] == -1
    assert found.signals["success_1"] == 0
    assert found.steps[-1].info["reason"] == "Player 0 has won!"
    seen = [m["content"] for m in found.conversation.view("ana").messages]
    assert "Player 1: [1]" in seen[2]
    assert not any("my plan" in text for text in seen)


@with_arena
def test_a_draw_is_no_success_of_anybody():
    players = [moves("[0]", "[1]", "[5]", "[6]", "[7]"), moves("[4]", "[2]", "[3]", "[8]")]
    [found] = TrajectoryRunner(TextArena("TicTacToe-v0"), players).run_batch([0])
    assert (found.outcome, found.success, found.reward) == ("done", False, 0.0)
    assert found.signals["success_1"] == 0
    assert "draw" in found.steps[-1].info["reason"]


@with_arena
def test_a_bad_move_is_the_players_who_made_it():
    players = [moves("[4]"), moves("[4]", "[4]")]
    [found] = TrajectoryRunner(TextArena("TicTacToe-v0"), players).run_batch([0])
    valid = [{s.name: s.value for s in step.signals}["valid"] for step in found.steps]
    assert [(s.message.author, v) for s, v in zip(found.steps, valid, strict=True)] == [
        ("player_0", 1),
        ("player_1", 0),
        ("player_1", 0),
    ]
    assert found.success  # the other has lost by it
    assert found.signals["reward_1"] == -1


@with_arena
def test_talk_is_said_as_it_is():
    """In a game of words nothing is put in brackets, which would make a move of it."""
    game = TextArena("IteratedPrisonersDilemma-v0", extractor="whole")
    players = [moves("Let us both be kind.", "yes"), moves("Agreed.", "so")]
    [found] = TrajectoryRunner(game, players, max_steps=2).run_batch([0])
    assert [s.info["action"] for s in found.steps] == ["Let us both be kind.", "Agreed."]
    heard = [m.content for m in found.transcript if m.heard_by("player_1") and m.author == "environment"]
    assert any("Let us both be kind." in text and "[Let us" not in text for text in heard)


@with_arena
def test_a_card_is_seen_by_its_owner_alone():
    game = TextArena("KuhnPoker-v0")
    assert game.players == 2
    backend = ScriptedBackend(lambda request: "[check]" if "check" in last(request) else "[call]")

    def last(request: Any) -> str:
        return str(request.prompt.messages[-1]["content"]).rsplit("available actions", 1)[-1]

    result = TrajectoryRunner(game, [backend, backend]).run_batch(num_tasks=6)
    cards = set()
    for found in result:
        assert found.outcome == "done"
        told = {
            name: "\n".join(
                m.content for m in found.transcript if m.author == "environment" and m.heard_by(name)
            )
            for name in ("player_0", "player_1")
        }
        dealt = {name: dict(re.findall(r"round (\d) .*card is: '(\w)'", text)) for name, text in told.items()}
        one, other = dealt.values()
        rounds = [(one[k], other[k]) for k in one.keys() & other.keys()]
        assert len(rounds) >= 2
        assert all(mine != theirs for mine, theirs in rounds)
        cards.add(tuple(rounds))
    assert len(cards) > 1  # the seed deals


@with_arena
@pytest.mark.parametrize("name", ["ConnectFour-v0", "Nim-v0", "IteratedPrisonersDilemma-v0", "Chopsticks-v0"])
def test_nonsense_ends_a_game_and_harms_nobody(name: str):
    """Twice the same, from the first word to the last."""
    said = [f"[{i % 4} {i % 3}] or [{i % 5}]" for i in range(400)]

    def once() -> Any:
        return TrajectoryRunner(TextArena(name), [moves(*said), moves(*said)], max_steps=40).run_batch([3])[0]

    one, two = once(), once()
    assert one.outcome in ("done", "limit"), one.error
    assert [m.identity() for m in one.transcript] == [m.identity() for m in two.transcript]


# -- what a review found


def test_a_move_that_fails_stays_with_its_player():
    class Picky(Nim):
        def step(self, state: Heap, action: str) -> StepResult:
            if "slowly" in action:
                raise RuntimeError("too slow")
            return super().step(state, action)

    [found] = TrajectoryRunner(Picky(), {"ana": perfect(), "ben": greedy()}).run_batch([2])
    assert found.outcome == "failed"
    assert found.transcript[-1].content == "1 slowly"
    assert not any("slowly" in m["content"] for m in found.conversation.view("ana").messages)


def test_a_trajectory_from_a_folder_sees_what_it_saw(tmp_path: Path):
    """An environment's system text is part of the view, of what is projected, and of a later analysis."""

    class Told(Nim):
        players = 1

        def messages(self, state: Heap) -> list[dict[str, Any]]:
            system = [{"role": "system", "content": f"Heap {state.left}."}] if not state.last else []
            return [*system, {"role": "user", "content": f"{state.left} are left."}]

        def step(self, state: Heap, action: str) -> StepResult:
            return StepResult(state=replace(state, left=state.left - 1, last="x"), terminated=state.left < 5)

    def views(trajectory: Any) -> tuple[int, ...]:
        return tuple(trajectory.conversation.view("model").ids)

    def runner() -> TrajectoryRunner:
        return TrajectoryRunner(Told(), HuggingFaceBackend(*tiny(), name="tiny"), {"max_tokens": 4}, "Play.")

    live = runner().run_batch([1])[0]
    kept = runner().run_batch([1], out_dir=tmp_path)[0]
    assert "Play.\n\nHeap 6." in kept.conversation.view("model").text
    assert views(kept) == views(live)
    for message in kept.transcript:
        if message.prompt_ids is not None:
            assert views(kept)[: len(message.prompt_ids)] == message.prompt_ids
    [later] = runner().analyzer(size=lambda t: len(views(t))).run_batch([1], out_dir=tmp_path, extend=True)
    assert later.analysis == {"size": len(views(live))}


def test_to_is_a_list():
    with pytest.raises(TypeError, match="a list of names, got 'bob'"):
        Message("a", "x", metadata={"to": "bob"})
