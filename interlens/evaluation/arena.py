"""Games of textarena, for one player or two."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from interlens.errors import require
from interlens.evaluation.environment import Signal, StepResult
from interlens.evaluation.extraction import Pattern, Whole, by_name, extract
from interlens.evaluation.games import Chance, Game, Success, Turn, close_to
from interlens.runner.records import storable
from interlens.templating import describe_callable


class TextArena(Game):
    """A game of textarena for one player, or for two, each of whom sees what the game tells them.

    `options` go to `textarena.make`. The move is what stands in the last square brackets of a reply, unless
    `extractor` is given (`"whole"` for games of talk). A game that ends is won where `success(reward)` holds:
    1 or more, unless given. The signal `valid` says whether the game took the move. `success` and `reward`
    are those of player 0, `success_1` and `reward_1` those of the other; where nobody won, both are 0.
    """

    def __init__(
        self,
        env_id: str,
        *,
        max_steps: int | None = None,
        options: Mapping[str, Any] | None = None,
        extractor: Any = None,
        success: Success | None = None,
        players: int | None = None,
    ) -> None:
        self.name = self.env_id = env_id
        self.options = dict(options or {})
        self.extractor = Pattern(r"\[[^\[\]]+\]") if extractor is None else by_name(extractor)
        self.success: Success = success or _whole
        self.players = players if players is not None else self._fitting()
        turns = self._begun(Chance(0), 0).state.max_turns
        self.max_steps = max_steps or (2 * turns if turns else 100)

    def describe(self) -> Any:
        """What results depend on, with the version of textarena."""
        return {
            "type": describe_callable(type(self)),
            "textarena": version("textarena"),
            "env_id": self.env_id,
            "players": self.players,
            "options": storable(self.options),
            "success": describe_callable(self.success),
            "extractor": self.extractor.describe(),
        }

    def reset(self, *, task: int, seed: int) -> Turn:
        """A new game of this seed; the task has no part in it."""
        self._chance = Chance(seed)
        self._game = self._begun(self._chance, seed)
        return self._stands(self._news(Turn(task, 0, "")))

    def messages(self, state: Turn) -> list[dict[str, Any]]:
        """What the game has said since the last move."""
        return [{"role": "user", "content": f"{state.note}{state.seen}"}]

    def step(self, state: Turn, action: str) -> StepResult:
        """Make the move that is found in the reply."""
        game = self._current(state)
        move = extract(action, self.extractor)
        if move is None:
            return self._unread(state, "No move was found in your reply: put it in square brackets.")
        if "[" not in move and not isinstance(self.extractor, Whole):  # words of talk are no move in brackets
            move = f"[{move}]"
        with self._chance.lent():
            over, _ = game.step(move)
        told = game.state.game_info[state.player]
        refused = bool(told["invalid_move"] or game.state.error_count)
        turn = self._news(Turn(state.task, state.steps + 1, "", over=bool(over)))
        info = {"action": move, **({"reason": told.get("reason"), "seen": turn.seen} if over else {})}
        signals = [Signal("format", 1.0, "format"), Signal("valid", not refused, "process")]
        for player in range(self.players):
            reward = game.state.rewards[player] if over and game.state.rewards else 0.0
            if not isinstance(reward, int | float):  # some games give reason and reward in the wrong order
                reward, info["reward_as_given"] = 0.0, reward
            won = bool(over) and bool(self.success(float(reward)))
            more = f"_{player}" if player else ""
            signals += [
                Signal(f"reward{more}", float(reward), "process" if player else "step"),
                Signal(f"success{more}", float(won), "process" if player else "outcome"),
            ]
        return StepResult(state=self._stands(turn), signals=signals, terminated=bool(over), info=info)

    def _news(self, turn: Turn) -> Turn:
        """What the game tells the player who moves next, but for their own words."""
        player, observed = self._game.get_observation()
        names, told = self._game.state.role_mapping, []
        for one in observed:  # author, text and kind, in an order that some games change
            text = next(part for part in one if isinstance(part, str))
            if "PLAYER_ACTION" in (getattr(part, "name", "") for part in one):
                author = next((part for part in one if isinstance(part, int)), player)
                if self.players == 1 or author == player:
                    continue
                text = f"{names.get(author, f'Player {author}')}: {text}"
            told.append(text.strip())
        return replace(turn, seen="\n\n".join(told), player=player if self.players > 1 else 0)

    def _fitting(self) -> int:
        """How many players it is for: one, or else two."""
        for self.players in (1, 2):
            with contextlib.suppress(ValueError):
                self._begun(Chance(0), 0)
                return self.players
        return 1

    def _begun(self, chance: Chance, seed: int) -> Any:
        """A game at its beginning, without textarena's wrappers."""
        arena = require("textarena", "a game of textarena", "eval")
        known = arena.envs.registration.ENV_REGISTRY
        if self.env_id not in known:
            near = close_to(self.env_id, (n for n in known if not n.endswith(("-raw", "-train"))))
            raise ValueError(f"textarena has no game {self.env_id!r}: {near}")
        try:
            with chance.lent():
                game = arena.make(self.env_id, **self.options)
                while isinstance(game, arena.Wrapper):
                    game = game.env
                game.reset(num_players=self.players, seed=seed)
        except Exception as error:  # whatever a game needs and has not: players, word lists, a jury's key
            raise ValueError(
                f"textarena's {self.env_id} does not begin for {self.players} player(s): {error!r}"
            ) from error
        kinds = {1: arena.SinglePlayerState, 2: arena.TwoPlayerState}
        if not isinstance(game.state, kinds.get(self.players, ())):
            raise ValueError(
                f"textarena's {self.env_id} is not for {self.players} player(s); games for one or two are "
                f"played here"
            )
        return game


def _whole(reward: float) -> bool:
    return reward >= 1.0
