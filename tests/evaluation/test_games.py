"""Games: a seed and actions bring the same each time, a win is a success, nonsense changes nothing."""

import copy
import pickle
import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from interlens.backends import ScriptedBackend
from interlens.evaluation.arena import TextArena
from interlens.evaluation.environment import StepResult
from interlens.evaluation.games import Chance, Game, TextGym, Turn
from interlens.evaluation.runner import TrajectoryRunner

with_gym = pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed")
with_arena = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")

FIRM = {"is_slippery": False}
CROSSING = ["down", "down", "right", "right", "down", "right"]
ROUND_THE_CLIFF = ["up", *["right"] * 11, "down"]


def played(game: Game, actions: Sequence[str], seed: int = 0) -> tuple[list[Turn], list[StepResult]]:
    """The states and results of some actions, in a game of its own."""
    own: Any = game.instance()
    states, results = [own.reset(task=0, seed=seed)], []
    for action in actions:
        results.append(own.step(states[-1], action))
        states.append(results[-1].state)
        if results[-1].terminated or results[-1].truncated:
            break
    return states, results


def values(result: StepResult) -> dict[str, float]:
    return {signal.name: signal.value for signal in result.signals}


def shown(game: Game, state: Turn) -> str:
    [message] = game.messages(state)
    assert message["role"] == "user"
    return str(message["content"])


def toy() -> Any:
    """A game of ours: count to 3; the actions begin at 5."""
    import gymnasium

    class Count(gymnasium.Env):  # type: ignore[type-arg]
        action_space = gymnasium.spaces.Discrete(2, start=5)
        observation_space = gymnasium.spaces.Discrete(10)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            self.count = 0
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.count += {5: -1, 6: 1}[action]
            return self.count, float(self.count), self.count == 3, self.count == -2, {}

    return Count()


# -- gymnasium


@with_gym
@pytest.mark.parametrize(
    ("name", "options", "actions"),
    [("FrozenLake-v1", FIRM, CROSSING), ("CliffWalking-v1", {}, ROUND_THE_CLIFF)],
)
def test_a_win_is_a_success(name: str, options: dict[str, Any], actions: list[str]):
    game = TextGym(name, options=options)
    _, results = played(game, actions)
    assert [values(r)["success"] for r in results] == [0.0] * (len(actions) - 1) + [1.0]
    assert [r.terminated for r in results] == [False] * (len(actions) - 1) + [True]
    assert {(s.name, s.kind) for s in results[0].signals} == {
        ("format", "format"), ("reward", "step"), ("success", "outcome"),
    }  # fmt: skip
    assert "seen" in results[-1].info


@with_gym
def test_a_taxi_ride():
    """Driven by what is read in the messages alone."""
    game = TextGym("Taxi-v4")
    state = game.reset(task=0, seed=3)
    assert "The passenger waits at R (row 0, column 0). The destination is Y (row 4, column 0)." in state.seen
    assert "taxi is in row 0, column 2" in state.seen
    ride = ["south", "south", "west", "west", "north", "north", "pick up", *["south"] * 4, "Drop-off."]
    states, results = played(game, ride, seed=3)
    assert "The passenger is in the taxi" in states[7].seen
    assert values(results[-1]) == {"format": 1, "reward": 20, "success": 1}
    assert sum(values(r)["reward"] for r in results) == 20 - 11


@with_gym
def test_a_loss_is_none():
    _, results = played(TextGym("FrozenLake-v1", options=FIRM), ["right", "down"])
    assert results[-1].terminated
    assert values(results[-1])["success"] == 0
    _, results = played(TextGym("Blackjack-v1"), ["hit"] * 20)
    assert results[-1].terminated
    assert values(results[-1]) == {"format": 1, "reward": -1, "success": 0}


@with_gym
def test_blackjack_is_told_in_words():
    game = TextGym("Blackjack-v1")
    seen = {game.reset(task=0, seed=seed).seen for seed in range(80)}
    assert all(s.startswith("Your cards add up to ") for s in seen)
    assert any("with an ace that counts 11" in s for s in seen)
    assert any("The dealer shows an ace" in s for s in seen)


@with_gym
@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalkingSlippery-v1", "Blackjack-v1"])
def test_the_same_seed_and_actions_bring_the_same(name: str):
    game = TextGym(name, max_steps=40)
    draws = random.Random(1)
    actions = [draws.choice(game.actions) for _ in range(40)]
    once, again = played(game, actions, seed=5), played(game, actions, seed=5)
    assert once == again
    others = [played(game, actions, seed=seed)[0] for seed in range(6, 14)]
    assert any(other != once[0] for other in others)


@with_gym
def test_the_task_has_no_part_in_it():
    game = TextGym("Taxi-v4")
    assert game.reset(task=1, seed=3).seen == game.reset(task=9, seed=3).seen
    assert game.reset(task=1, seed=3).seen != game.reset(task=1, seed=4).seen


@with_gym
@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("right", "right"),
        ("I go RIGHT.", "right"),
        ("Not left; **down**", "down"),
        ("<think>up</think>left", "left"),
        ("2", "right"),
        ("action: 3.", "up"),
        ("2 steps, so: left", "left"),
        ("leftover, upright", None),
        ("", None),
        ("4", None),
        ("-1", None),
        ("2.5", None),
        ("<think>right", None),
    ],
)
def test_the_last_action_of_a_reply_is_taken(reply: str, action: str | None):
    _, [result] = played(TextGym("FrozenLake-v1", options=FIRM), [reply])
    assert result.info["action"] == action


@with_gym
def test_what_cannot_be_read_changes_nothing():
    game = TextGym("FrozenLake-v1", options=FIRM)
    plain, _ = played(game, CROSSING)
    states, results = played(game, ["hm", *CROSSING[:3], "?", *CROSSING[3:]])
    assert [values(r)["format"] for r in results] == [0, 1, 1, 1, 0, 1, 1, 1]
    assert values(results[0]) == {"format": 0, "success": 0}
    assert results[0].info == {"action": None, "unreadable": "No action was found in your reply."}
    assert values(results[-1])["success"] == 1
    assert [s.seen for s in states] == [plain[i].seen for i in (0, 0, 1, 2, 3, 3, 4, 5, 6)]
    assert states[1].steps == 1
    assert "No action was found" in shown(game, states[1])
    assert "No action was found" not in shown(game, states[2])


@with_gym
def test_messages_tell_the_rules_once_and_the_actions_always():
    game = TextGym("FrozenLake-v1", options=FIRM)
    states, _ = played(game, CROSSING)
    first, later = shown(game, states[0]), shown(game, states[1])
    assert first.startswith("You cross a frozen lake.")
    assert "You cross" not in later
    assert all("Actions: left, down, right, up." in text for text in (first, later))
    assert "[S]" in first
    assert later.splitlines()[1] == "[F] H  F  H "
    assert "slippery" not in first
    slippery = TextGym("FrozenLake-v1")
    assert "slippery" in shown(slippery, slippery.reset(task=0, seed=0))


@with_gym
def test_a_game_goes_on_from_its_last_state_only():
    game = TextGym("FrozenLake-v1", options=FIRM)
    first = game.reset(task=0, seed=0)
    game.step(first, "down")
    with pytest.raises(ValueError, match="is not where step 0 of task 0 says"):
        game.step(first, "down")
    with pytest.raises(ValueError, match="is not where step 0"):
        copy.deepcopy(game).step(first, "down")
    states, _ = played(game, ["right", "down"])
    with pytest.raises(ValueError, match="is over"):
        game.step(states[-1], "down")


@with_gym
def test_instances_do_not_share_a_game():
    game = TextGym("FrozenLake-v1", options=FIRM)
    one, other = game.instance(), pickle.loads(pickle.dumps(game))
    a, b = one.reset(task=0, seed=0), other.reset(task=0, seed=0)
    for action in CROSSING[:3]:
        a = one.step(a, action).state
    assert other.step(b, "right").state.seen.startswith(" S [F]")
    assert values(one.step(one.step(one.step(a, "right").state, "down").state, "right"))["success"] == 1


@with_gym
def test_a_game_of_ones_own():
    game = TextGym(toy, actions=["one less", "one more"], rules="Count to 3.", max_steps=7)
    assert (game.name, game.max_steps) == ("toy", 7)
    states, results = played(game, ["one more"] * 5)
    assert shown(game, states[0]) == (
        "Count to 3.\n\nObservation: 0\n\nActions: one less, one more. End your reply with one of them."
    )
    assert [values(r)["reward"] for r in results] == [1, 2, 3]
    assert values(results[-1])["success"] == 1
    _, results = played(game, ["One-less", "0"])
    assert (results[-1].truncated, results[-1].terminated) == (True, False)
    assert values(results[-1])["success"] == 0
    strict = TextGym(toy, actions=["one less", "one more"], success=lambda reward: reward > 3)
    assert values(played(strict, ["one more"] * 3)[1][-1])["success"] == 0
    drawn = TextGym(toy, render=lambda env, seen: "|" * seen + str(env.count))
    assert played(drawn, ["1", "1"])[0][-1].seen == "||2"
    assert drawn.actions == ("0", "1")


@with_gym
def test_an_extractor_of_ones_own():
    game = TextGym("FrozenLake-v1", options=FIRM, extractor="tag", rules="Cross.")
    assert game.problems() == []
    _, results = played(
        game, ["right", "<answer>Right</answer> left", "<answer>to the right</answer>", "<answer>0</answer>"]
    )
    assert [r.info["action"] for r in results] == [None, "right", None, "left"]


@with_gym
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("FrozenLake-v9", {}, "the nearest are FrozenLake-v1"),
        ("Forzenlake", {}, "FrozenLake-v1"),
        ("FrozenLake-v1", {"options": {"slippery": 1}}, "makes no FrozenLake-v1 with"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "has 4 actions"),
        ("FrozenLake-v1", {"actions": ["a", "A", "b", "c"]}, "each with a name of its own"),
        ("Pendulum-v1", {}, "a few actions"),
    ],
)
def test_a_mistake_is_told(name: str, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        TextGym(name, **options)


@with_gym
def test_what_results_depend_on_is_described():
    games = [
        TextGym("FrozenLake-v1"),
        TextGym("FrozenLake-v1", options=FIRM),
        TextGym("FrozenLake-v1", rules="Cross."),
        TextGym("FrozenLake-v1", extractor="tag"),
        TextGym("FrozenLake-v1", success=lambda reward: reward > 2),
        TextGym("Taxi-v4"),
    ]
    assert len({repr(game.describe()) for game in games}) == len(games)
    assert repr(games[0].describe()) == repr(TextGym("FrozenLake-v1").describe())


@with_gym
def test_trajectories_each_have_a_game_and_can_be_branched():
    replies = iter(CROSSING * 3)
    backend = ScriptedBackend(lambda request: next(replies))
    runner = TrajectoryRunner(TextGym("FrozenLake-v1", options=FIRM), backend)
    result = runner.run_batch(num_tasks=3, batch_size=1)
    assert [t.success for t in result] == [True] * 3
    assert [t.n_steps for t in result] == [6] * 3
    falls = TrajectoryRunner(TextGym("FrozenLake-v1", options=FIRM), ScriptedBackend(lambda request: "right"))
    [branch] = falls.branch(result[0], 3, action="up")
    assert [s.action for s in branch.steps][:4] == ["down", "down", "right", "up"]
    assert (branch.outcome, branch.success, branch.n_steps) == ("done", False, 4)


@with_gym
def test_nothing_a_model_says_raises():
    game = TextGym("FrozenLake-v1", max_steps=10)
    draws = random.Random(2)
    words = [
        "left",
        "up",
        "7",
        "\x1b[0m",
        "½",
        "]",
        "<think>",
        "</think>",
        "\n",
        "9" * 5000,
        "\\boxed{",
        "\0",
        "",
    ]
    for seed in range(30):
        played(game, ["".join(draws.choices(words, k=4)) for _ in range(10)], seed=seed)


# -- textarena

HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]


@with_arena
def test_a_solved_puzzle_is_a_success():
    game = TextArena("TowerOfHanoi-v0")
    states, results = played(game, [f"I think [A A] is wrong, so {move}" for move in HANOI])
    assert [values(r)["success"] for r in results] == [0] * 6 + [1]
    assert values(results[-1]) == {"format": 1, "valid": 1, "reward": 1, "success": 1}
    assert results[-1].terminated
    assert "solved" in results[-1].info["reason"]
    assert "You are playing Tower of Hanoi" in shown(game, states[0])
    assert "C: [3, 2, 1]" in results[-1].info["seen"]


@with_arena
def test_only_what_is_new_is_shown():
    game = TextArena("TowerOfHanoi-v0")
    states, _ = played(game, HANOI)
    assert "You are playing" not in shown(game, states[1])
    assert "You moved disk 1 from A to C." in shown(game, states[1])
    assert "I think" not in shown(game, played(game, ["I think [A C]"])[0][1])


@with_arena
def test_a_refused_move_and_an_unreadable_one_are_told_apart():
    game = TextArena("TowerOfHanoi-v0")
    states, results = played(game, ["up!", "[A C]", "[B C]", "[B A]"])
    assert values(results[0]) == {"format": 0, "success": 0}
    assert "square brackets" in shown(game, states[1])
    assert "You are playing" in shown(game, states[1])
    assert [values(r).get("valid") for r in results] == [None, 1, 0, 0]
    assert [r.terminated for r in results] == [False, False, False, True]
    assert values(results[-1]) == {"format": 1, "valid": 0, "reward": 0, "success": 0}


@with_arena
@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("GuessTheNumber-v0", [f"[{n}]" for n in range(1, 20, 3)]),
        ("Sokoban-v0", ["[up]", "[right]", "[down]", "[left]"] * 3),
        ("2048-v0", ["[Up]", "[Right]", "[Down]", "[Left]"] * 3),
        ("Minesweeper-v0-small", ["[0 0]", "[4 4]", "[0 4]", "[4 0]", "[2 2]"]),
        ("FrozenLake-v0-random", ["[up]", "[right]", "[down]", "[left]"]),
    ],
)
def test_a_seed_brings_the_same_whatever_else_draws(name: str, moves: list[str]):
    game = TextArena(name)
    once = played(game, moves, seed=4)
    random.seed(99)
    before = random.getstate()
    own: Any = game.instance()
    other: Any = game.instance()
    state, beside = own.reset(task=0, seed=4), other.reset(task=0, seed=8)
    states, results = [state], []
    for move in moves:
        results.append(own.step(states[-1], move))
        states.append(results[-1].state)
        if results[-1].terminated:
            break
        if not beside.over:
            beside = other.step(beside, move).state
    assert (states, results) == once
    assert random.getstate() == before
    assert any(played(game, moves, seed=seed) != once for seed in range(5, 12))


ONE_PLAYER = """
2048-v0 Bandit-v0 Blackjack-v0 Countdown-v0 Crosswords-v0 Cryptarithm-v0 FifteenPuzzle-v0 FrozenLake-v0
GuessTheNumber-v0 LightsOut-v0 LogicPuzzle-v0 Mastermind-v0 Minesweeper-v0 PegJump-v0 RushHour-v0 Secretary-v0
Set-v0 Slitherlink-v0 Sokoban-v0 Sudoku-v0-easy ThreeCardMonte-v0 TowerOfHanoi-v0
"""


@with_arena
@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PLAYER.split())
def test_nonsense_wins_no_game(name: str):
    game = TextArena(name)
    nonsense = ["[zzz]", "no", "[zzz]", "[zzz]"]
    states, results = played(game, nonsense, seed=3)
    assert (states, results) == played(game, nonsense, seed=3)
    assert [values(r)["success"] for r in results] == [0] * len(results)
    assert not any(values(r).get("valid") for r in results)
    assert "zzz" not in "".join(state.seen for state in states)


@with_arena
def test_the_players_own_words_are_not_shown_whatever_their_order():
    game = TextArena("Countdown-v0")
    states, results = played(game, ["so [0 1 +]"])
    assert values(results[0])["valid"] == 1
    assert "[0 1 +]" not in states[1].seen
    assert "TARGET: 532" in states[1].seen


@with_arena
def test_a_bare_move_is_put_in_brackets_for_ones_own_extractor():
    game = TextArena("GuessTheNumber-v0", extractor="numeric")
    found = set()
    for guess in range(1, 21):
        _, [result] = played(game, [f"My guess is {guess}."], seed=2)
        assert result.info["action"] == f"[{guess}]"
        found.add(values(result)["success"])
    assert found == {0.0, 1.0}


@with_arena
def test_a_reward_that_is_none_is_told():
    """textarena's ThreeCardMonte gives the reason as the reward of a move that it refuses."""
    _, results = played(TextArena("ThreeCardMonte-v0"), ["[x]", "[x]"])
    assert values(results[-1]) == {"format": 1, "valid": 0, "reward": 0, "success": 0}
    assert results[-1].info["reward_as_given"] == "Bad action. Use `[k]`."


@with_arena
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TowerOfHanio-v0", "the nearest are TowerOfHanoi-v0"),
        ("Poker-v0", "does not begin for 1 player"),
        ("TwentyQuestions-v0", "OPENROUTER_API_KEY"),
    ],
)
def test_a_game_that_cannot_be_played_is_told(name: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=said):
        TextArena(name)


@with_arena
def test_options_reach_the_game_and_the_recipe():
    plain, long = TextArena("TowerOfHanoi-v0"), TextArena("TowerOfHanoi-v0", options={"num_disks": 4})
    assert "4 disks" in long.reset(task=0, seed=0).seen
    assert repr(plain.describe()) != repr(long.describe())
    assert plain.max_steps == 28
    assert pickle.loads(pickle.dumps(long)).reset(task=0, seed=0) == long.reset(task=0, seed=0)


@with_arena
def test_a_trajectory_of_textarena():
    replies = iter(HANOI)
    [found] = TrajectoryRunner(
        TextArena("TowerOfHanoi-v0"), ScriptedBackend(lambda request: next(replies))
    ).run_batch(num_tasks=1)
    assert (found.success, found.reward, found.n_steps) == (True, 1.0, 7)


# -- chance


def test_chance_goes_on_from_where_it_stood():
    import numpy as np

    def draws(chance: Chance) -> tuple[float, float]:
        with chance.lent():
            return random.random(), float(np.random.rand())

    one, other, same = Chance(1), Chance(2), Chance(1)
    before = random.getstate()
    mixed = [draws(one), draws(other), draws(one), draws(other)]
    alone = [draws(same), draws(same)]
    assert [mixed[0], mixed[2]] == alone
    assert mixed[0] != mixed[1]
    assert random.getstate() == before
    with pytest.raises(KeyError), one.lent():
        raise KeyError
    assert random.getstate() == before
