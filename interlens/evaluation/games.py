"""Games that are played turn by turn, and those of gymnasium that have a few actions.

A game is changed by what is done in it, so each trajectory has one of its own (`pure_step` is False), which
the same seed and the same actions bring to the same place.
"""

import contextlib
import difflib
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from interlens.errors import require
from interlens.evaluation.environment import Environment, Signal, StepResult
from interlens.evaluation.extraction import Extractor, First, Pattern, by_name, extract, mismatch
from interlens.runner.records import storable
from interlens.templating import describe_callable

Success = Callable[[float], bool]
"""Whether a game that has ended is won, of its last reward."""


class Chance:
    """The global generators of `random` and numpy, for code that draws from them: inside `lent()` they go on
    from where they stood at its last end (from the seed, the first time); after it they are as before. Only
    one at a time in a process.
    """

    _lock = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._held: Any = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Draw from these."""
        import numpy as np

        with self._lock:
            before = random.getstate(), np.random.get_state()
            if self._held is None:
                random.seed(self._seed)
                np.random.seed(self._seed % 2**32)
            else:
                random.setstate(self._held[0])
                np.random.set_state(self._held[1])
            try:
                yield
            finally:
                self._held = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a game stands, for whoever plays it."""

    task: int
    steps: int
    """How many actions there were."""
    seen: str
    """What is to be seen of the game."""
    note: str = ""
    """What was wrong with the last action."""
    over: bool = False
    player: int = 0
    """Who moves next."""


class Game(Environment):
    """A game that goes on inside the environment. A copy has no game until its `reset`.

    Signals: `format` (whether an action was found in the reply), `reward` of each step, and `success`, which
    is 0 until the game is won. An action that is not found changes nothing, and counts as a step.
    """

    pure_step = False
    extractor: Extractor
    _game: Any = None
    _turn: Turn | None = None

    def current_player(self, state: Turn) -> int:
        """Who moves next."""
        return state.player

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_game", "_turn", "_chance")}

    def _current(self, state: Turn) -> Any:
        """The game, if it stands where the state says."""
        if state.over:
            raise ValueError(f"{self.name} is over; reset begins another")
        if self._game is None or state != self._turn:
            raise ValueError(
                f"{self.name} is not where step {state.steps} of task {state.task} says: a game goes on from "
                f"its last state only; reset, and take the actions again"
            )
        return self._game

    def _stands(self, turn: Turn) -> Turn:
        self._turn = turn
        return turn

    def _unread(self, state: Turn, why: str) -> StepResult:
        """What comes of a reply without an action."""
        turn = replace(state, steps=state.steps + 1, note=f"{why} Nothing has changed.\n\n")
        signals = (Signal("format", 0.0, "format"), Signal("success", 0.0))
        return StepResult(state=self._stands(turn), signals=signals, info={"action": None, "unreadable": why})


# -- gymnasium


class TextGym(Game):
    """A gymnasium game whose actions are a few words: FrozenLake, Taxi, CliffWalking, Blackjack, or your own.

    `env` is an id or a function that makes the game, the same each time; `options` go to `gymnasium.make`.
    `actions` names the actions in order; `render(game, observation)` is the text of what is seen; `rules`
    opens the first message. A game that ends is won where `success(last reward)` holds: if above 0.
    A reply means the last action it names, or else the last action's number, unless `extractor` is given.
    """

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        render: Callable[[Any, Any], str] | None = None,
        actions: Sequence[str] | None = None,
        max_steps: int | None = None,
        rules: str | None = None,
        options: Mapping[str, Any] | None = None,
        success: Success | None = None,
        extractor: Any = None,
    ) -> None:
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self.env, self.options = env, dict(options or {})
        self._mode: dict[str, str] = {}
        game = self._make()
        if render is None and "ansi" in (game.metadata.get("render_modes") or ()) and isinstance(env, str):
            self._mode = {"render_mode": "ansi"}
        known = _KNOWN.get(re.sub(r"(8x8|Slippery)?-v\d+$", "", game.spec.id if game.spec else ""), _Known())
        self._first = _first_action(game, self.name)
        self.actions = _named_actions(actions or known.actions, int(game.action_space.n), self.name)
        self.render = render or known.render or _shown
        self.rules = f"You play {self.name}." if rules is None and not known.rules else rules or known.rules
        if rules is None and known.rules and _slippery(game):
            self.rules += " It is slippery: a move may take you aside instead."
        self.success: Success = success or known.success
        limit = game.spec.max_episode_steps if game.spec else None
        self.max_steps = max_steps or limit or 100
        self.extractor = _action_extractor(self.actions) if extractor is None else by_name(extractor)
        self._ask = f"Actions: {', '.join(self.actions)}."
        self._ask += (
            f" {self.extractor.hint}" if extractor is not None else " End your reply with one of them."
        )
        self._by_key = {_key(str(i)): i for i in range(len(self.actions))}
        self._by_key |= {_key(action): i for i, action in enumerate(self.actions)}
        game.close()

    def describe(self) -> Any:
        """What results depend on, with the version of gymnasium."""
        return {
            "type": describe_callable(type(self)),
            "gymnasium": version("gymnasium"),
            "env": self.env if isinstance(self.env, str) else describe_callable(self.env),
            "options": storable(self.options),
            "texts": [self.rules, *self.actions],
            "render": describe_callable(self.render),
            "success": describe_callable(self.success),
            "extractor": self.extractor.describe(),
        }

    def problems(self, system_prompt: str | None = None) -> list[str]:
        """Where the messages do not ask for what the extractor reads."""
        found = mismatch(self.extractor, f"{system_prompt or ''}\n\n{self.rules}\n\n{self._ask}")
        return [found] if found else []

    def reset(self, *, task: int, seed: int) -> Turn:
        """A new game of this seed; the task has no part in it."""
        if self._game is None:
            self._game = self._make()
        observation, _ = self._game.reset(seed=seed)
        return self._stands(Turn(task, 0, self.render(self._game, observation)))

    def messages(self, state: Turn) -> list[dict[str, Any]]:
        """What is seen, and the actions; the rules the first time."""
        opening = f"{self.rules}\n\n" if state.steps == 0 and self.rules else ""
        return [{"role": "user", "content": f"{opening}{state.note}{state.seen}\n\n{self._ask}"}]

    def step(self, state: Turn, action: str) -> StepResult:
        """Take the action that the reply names."""
        game = self._current(state)
        answer = extract(action, self.extractor)
        index = self._by_key.get(_key(answer)) if answer is not None else None
        if index is None:
            return self._unread(state, "No action was found in your reply.")
        observation, reward, terminated, truncated, _ = game.step(self._first + index)
        over = bool(terminated or truncated)
        won = bool(terminated) and bool(self.success(float(reward)))
        turn = Turn(state.task, state.steps + 1, self.render(game, observation), over=over)
        return StepResult(
            state=self._stands(turn),
            signals=[
                Signal("format", 1.0, "format"),
                Signal("reward", float(reward), "step"),
                Signal("success", float(won)),
            ],
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
            info={"action": self.actions[index], **({"seen": turn.seen} if over else {})},
        )

    def _make(self) -> Any:
        gym = require("gymnasium", "a game of gymnasium", "eval")
        if not isinstance(self.env, str):
            return self.env()
        try:
            return gym.make(self.env, **self.options, **self._mode)
        except gym.error.UnregisteredEnv as error:
            raise ValueError(
                f"gymnasium has no game {self.env!r}: {close_to(self.env, gym.registry)}"
            ) from error
        except (gym.error.Error, TypeError) as error:
            raise ValueError(f"gymnasium makes no {self.env} with {self.options}: {error}") from error


def close_to(name: str, known: Iterable[str]) -> str:
    """The names that are nearest to one, in words."""
    near = difflib.get_close_matches(name, sorted(known), n=5, cutoff=0.4)
    return f"the nearest are {', '.join(near)}" if near else "and none of a similar name"


def _first_action(game: Any, name: str) -> int:
    gym = require("gymnasium", "a game of gymnasium", "eval")
    space = game.action_space
    if not isinstance(space, gym.spaces.Discrete):
        raise ValueError(
            f"the actions of {name} are {space}; TextGym plays games of a few actions (Discrete)"
        )
    return int(space.start)


def _named_actions(given: Sequence[str] | None, n: int, name: str) -> tuple[str, ...]:
    """A name for each action; its number, where it has none."""
    names = tuple(str(i) for i in range(n)) if not given else tuple(given)
    if len(names) != n or len({_key(one) for one in names}) < n or not all(_key(one) for one in names):
        raise ValueError(f"{name} has {n} actions, each with a name of its own; got {', '.join(names)}")
    return names


def _key(text: str) -> str:
    """An action's name in one way: pick-up, Pick up and pickup are one."""
    return re.sub(r"[\s_-]+", "", text.casefold())


def _action_extractor(actions: Sequence[str]) -> Extractor:
    """Reads the last name of an action, or else the last number of one."""
    either = "|".join(
        r"[\s_-]*".join(re.escape(word) for word in re.split(r"[\s_-]+", name))
        for name in sorted(actions, key=len, reverse=True)
    )
    numbers = "|".join(str(i) for i in reversed(range(len(actions))))
    return First(
        Pattern(rf"(?i)(?<!\w)(?:{either})(?!\w)"), Pattern(rf"(?<![\w.-])(?:{numbers})(?!\w|[.]\d)")
    )


def _shown(game: Any, observation: Any) -> str:
    """The game as text, coloured characters in brackets; the bare observation where it draws nothing."""
    drawn = game.render() if game.render_mode == "ansi" else None
    if not isinstance(drawn, str):
        plain = observation.tolist() if hasattr(observation, "tolist") else observation
        return f"Observation: {plain}"
    return re.sub(r"(?:\x1b\[[0-9;]*m)+(.*?)\x1b\[0m", r"[\1]", drawn).strip()


def _lake(game: Any, observation: Any) -> str:
    tiles = [[tile.decode() for tile in row] for row in game.unwrapped.desc]
    row, column = divmod(int(observation), len(tiles[0]))
    tiles[row][column] = f"[{tiles[row][column]}]"
    return "\n".join("".join(tile if len(tile) > 1 else f" {tile} " for tile in row) for row in tiles)


def _taxi(game: Any, observation: Any) -> str:
    row, column, at, to = (int(part) for part in game.unwrapped.decode(int(observation)))
    places = [
        f"{name} (row {r}, column {c})" for name, (r, c) in zip("RGYB", game.unwrapped.locs, strict=True)
    ]
    drawn = "\n".join(b"".join(line).decode() for line in game.unwrapped.desc)
    passenger = f"waits at {places[at]}" if at < len(places) else "is in the taxi"
    return (
        f"{drawn}\nThe taxi is in row {row}, column {column}. The passenger {passenger}. "
        f"The destination is {places[to]}."
    )


def _cards(game: Any, observation: Any) -> str:
    total, dealer, ace = (int(part) for part in observation)
    counted = ", with an ace that counts 11" if ace else ""
    return f"Your cards add up to {total}{counted}. The dealer shows {'an ace' if dealer == 1 else dealer}."


def _slippery(game: Any) -> bool:
    """Whether a move may go wrong; FrozenLake is slippery unless told otherwise."""
    given = game.spec.kwargs if game.spec else {}
    name = game.spec.id if game.spec else ""
    return bool(given.get("is_slippery", given.get("is_rainy", name.startswith("FrozenLake"))))


def _positive(reward: float) -> bool:
    return reward > 0


def _always(reward: float) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a game."""

    actions: tuple[str, ...] = ()
    rules: str = ""
    render: Callable[[Any, Any], str] | None = None
    success: Success = _positive


_KNOWN = {
    "FrozenLake": _Known(
        ("left", "down", "right", "up"),
        "You cross a frozen lake. S is the start, F is ice, H is a hole, which ends the game, and G is the "
        "goal. The tile in brackets is where you are.",
        _lake,
    ),
    "CliffWalking": _Known(
        ("up", "right", "down", "left"),
        "You walk from the lower left corner to the target T without stepping on the cliff C, which takes "
        "you back to the start. You are at x, and o is safe ground.",
        None,
        _always,  # it ends at the target only, with a reward of -1
    ),
    "Taxi": _Known(
        ("south", "north", "east", "west", "pick up", "drop off"),
        "You drive a taxi. Fetch the passenger, and drop them off at the destination. Rows and columns count "
        "from 0 at the upper left; the taxi passes : and not |.",
        _taxi,
    ),
    "Blackjack": _Known(
        ("stick", "hit"),
        "You play blackjack against a dealer: hit takes another card, stick none; above 21 you lose. "
        "Face cards count 10.",
        _cards,
    ),
}
