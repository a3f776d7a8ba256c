"""The seen side of a conversation: what each participant sees, what its model makes of it, and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import crossing, html, program
from interlens.chat.view import View
from interlens.dialogue import Dialogue
from interlens.interp.directions import Direction
from interlens.interp.reading import patch_grid
from interlens.interp.tracing import trace
from interlens.message import Message, sound
from interlens.models import ModelParticipant
from interlens.runner.scheduler import scheduler

if TYPE_CHECKING:
    import pandas


class Viewing(Dialogue):
    """Reading a conversation; nothing here adds to it."""

    def _ready(self) -> None:
        if self.recipe.needs_row or self.recipe.data is not None:
            raise ValueError(
                "this is a recipe whose templates or data make one conversation per row: run rollout(...), "
                "and look at "
                "report.results[id].conversation"
            )

    # -- inside

    def project(self, direction: Direction, readers: Sequence[Any] | None = None) -> "pandas.DataFrame":
        """The mean projection h.u over every message's content, in the view of everybody who reads it."""
        return crossing.project(self, direction, readers)

    def compare(self, other: "Viewing", direction: Direction | None = None) -> "pandas.DataFrame":
        """This branch and another side by side: words, log-probabilities and projections, by message."""
        return crossing.compare(self, other, direction)

    def patch_grid(self, other: "Viewing", speaker: Any, metric: Any, **where: Any) -> "pandas.DataFrame":
        """Run what a speaker sees in `other` with one activation of this branch at a time.

        `metric` takes the next token's logits `[V]`; `site=`, `layers=` and `positions=` say where (see
        `interlens.patch_grid`). A cell is the share of the way from the other branch (0) to this one (1).
        """
        who = self.participant(speaker)
        return patch_grid(who, self.view(who).ids, other.view(who.name).ids, metric, **where)

    def trace(self, speaker: Any, turn: int = -1, *, edits: bool = True, grad: bool = False) -> Any:
        """An nnsight tracer over exactly the ids that a participant saw and said in one of its turns.

        `turn` counts speaking turns, negative from this speaker's last. The turn's edits are made again
        unless `edits=False`. `tracer.nn` is the wrapped model: `t.nn.model.layers[12].output.save()`.
        Limits are nnsight's (`interp.tracing`).
        """
        who = self.participant(speaker)
        message = self._spoken(who.name, turn)
        if not isinstance(who, ModelParticipant) or message.prompt_ids is None:
            raise TypeError(f"{who.name} is answered by {type(who).__name__}, which has no module to trace")
        ids = (*message.prompt_ids, *(message.token_ids or ()))
        return trace(who.resident, ids, message.edits if edits else (), grad=grad)

    def _spoken(self, name: str, turn: int) -> Message:
        """The message of a participant's turn."""
        own = [m for m in self._transcript if m.author == name]
        found = (
            own[turn : turn + 1 or None] if turn < 0 else [m for m in own if m.metadata.get("turn") == turn]
        )
        if not found:
            turns = [m.metadata.get("turn") for m in own]
            raise LookupError(f"{name} has no turn {turn}; it spoke in the turns {turns}")
        return found[0]

    def view(self, pov: Any) -> View:
        """Exactly what a participant would be given if it spoke now; loads a tokenizer, never weights."""
        self._ready()
        return scheduler().ask(program.look(self, self.participant(pov)))

    def render_templated(self, pov: Any) -> str:
        """The view as the text its template makes."""
        return self.view(pov).text

    def tokens(self, pov: Any) -> View:
        """The view, for its `.ids` and spans."""
        view = self.view(pov)
        view.segments_or_raise()
        return view

    # -- showing

    def frame(self) -> "pandas.DataFrame":
        """One row per message."""
        return self._transcript.frame()

    def __repr__(self) -> str:
        state = f"{self.n_turns} turns, {self.tokens_generated} tokens"
        extra = f", {self._origin}" if self._origin else ""
        return f"Conversation({', '.join(self.names)}: {state}{extra})"

    def _repr_html_(self) -> str:
        head = html.tag("p", html.tag("b", repr(self)))
        parts = [head, self._transcript.picture()]
        if self.draft is not None:
            words = html.said(self.draft.author, html.clipped(self.draft.content), note="· draft, broken off")
            parts.append(html.tag("div", words, style="opacity:.75"))
        return html.tag("div", *parts)

    def tint(self, values: Any, *, reader: Any = None, along: Any = None, name: str | None = None) -> Any:
        """The transcript with its tokens coloured by a number each, as a static picture with a `frame()`.

        `values` is `"logprob"` (kept by `logprobs=True`); a `Direction` or a `Probe` with a layer, read in
        one pass over the transcript by each message's author, or by `reader`; `Activations` of one site and
        layer that turns captured, projected by `reduce=` or `along` a direction; a mapping from message index
        to a number for each of its tokens; or a number for each position of the `reader`'s view.
        """
        from interlens.notebook.tint import tint

        return tint(self, values, reader=reader, along=along, name=name)

    def explore(self, acts: Any, along: Any = None) -> Any:
        """A widget of what turns captured at one site: the layers under a slider, tokens to point at and pin.

        A token's number is its projection on `along` (or on the capture's own direction), or else the norm.
        """
        from interlens.notebook.widgets import explore

        return explore(self, acts, along)

    def steering(self, direction: Any, speaker: Any, *, turn: int | None = None) -> Any:
        """A widget that takes a turn of a speaker (its last) again with a push along a direction, or one of
        several by name, beside the turn without; this conversation stays as it is. `turn` counts speaking
        turns of the conversation, from 0; negative, the speaker's from its last.
        """
        from interlens.notebook.panels import steering

        return steering(self, direction, speaker, turn)

    def chat(self, seat: str | None = None) -> Any:
        """A widget in which a person talks with the participants, from the seat of a `HumanParticipant`, or
        under a name of their own (the moderator's). While they answer, the conversation is the widget's.
        """
        from interlens.notebook.panels import chat

        return chat(self, seat)

    def show(self) -> None:
        """Show the conversation so far: as HTML in a notebook, as text in a terminal."""
        from interlens.notebook.live import show

        show(self)

    def save_html(self, path: str | Path) -> Path:
        """Write one self-contained file."""
        messages = self._transcript.html_messages()
        whole = sound(html.page(repr(self), html.tag("h1", repr(self)), *messages))
        Path(path).write_text(whole, encoding="utf-8")
        return Path(path)
