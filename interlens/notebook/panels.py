"""Widgets that make a model speak: a turn with and without a push, and a chat in which a person has a seat.

What a click begins runs in a thread of its own, so that a stop is heard; traits tell how it goes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import traitlets
from traitlets import Bool, Dict, Float, Int, List, Unicode

from interlens import html
from interlens.hosted import APIParticipant
from interlens.interp.directions import Direction
from interlens.interp.edits import Edit, Steer
from interlens.interp.sites import decoder_layers
from interlens.message import Message, sound
from interlens.models import SAMPLING, ModelParticipant
from interlens.notebook.widgets import Widget, block, entries
from interlens.participants import HumanParticipant, Participant

NOBODY: dict[str, Any] = {"author": "", "content": "", "note": "", "place": 0}


class Panel(Widget):
    """Runs one thing at a time, in a thread."""

    busy = Bool(False).tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        self._stop, self._running = False, threading.Lock()
        super().__init__(**traits)
        self.on_msg(lambda widget, content, buffers: self._told(content))

    def _told(self, content: Mapping[str, Any]) -> None:
        """Do what a click asks for."""
        raise NotImplementedError

    def _begin(self, work: Callable[[], None]) -> bool:
        """Run this, unless something runs; `False` if it does."""
        if not self._running.acquire(blocking=False):
            return False
        self._stop = False

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.error = sound(f"{type(error).__name__}: {error}")
            finally:
                try:
                    self.busy = False
                finally:
                    self._running.release()

        try:
            self.busy, self.error = True, ""
            threading.Thread(target=run, daemon=True, name="interlens-panel").start()
        except BaseException:
            self._running.release()
            raise
        return True

    def stop(self) -> None:
        """Break off what runs; words that are not a whole turn are not kept."""
        self._stop = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs; `False` if it took too long."""
        if not self._running.acquire(timeout=-1 if timeout is None else timeout):
            return False
        self._running.release()
        return True

    def _heard(self, pieces: Iterator[str]) -> Iterator[str]:
        """Text so far, until it ends or is stopped."""
        text = ""
        try:
            for piece in pieces:
                text += piece
                yield text
                if self._stop:
                    return
        finally:
            pieces.close()  # type: ignore[attr-defined]


# -- steering


class Steering(Panel):
    """One turn of a speaker as it was, and again with a push of `strength` along a `direction` at a `layer`;
    the draws are the same, so that nothing differs but the push.
    """

    names = List(Unicode()).tag(sync=True)
    direction = Unicode().tag(sync=True)
    layer = Int(0).tag(sync=True)
    depth = Int(1).tag(sync=True)
    strength = Float(1.0).tag(sync=True)
    limit = Float(8.0).tag(sync=True)
    plain = Dict(NOBODY).tag(sync=True)
    steered = Dict(NOBODY).tag(sync=True)

    def __init__(self, conv: Any, directions: Mapping[str, Any], speaker: Any, turn: int | None) -> None:
        who = conv.participant(speaker)
        if not isinstance(who, ModelParticipant) or isinstance(who, APIParticipant):
            kind = type(who).__name__
            raise TypeError(f"{who.name} is answered by {kind}: only a local model can be steered")
        place, before = _turn_of(conv, who, turn)
        self._directions = dict(directions)
        self._who = who
        known = before.metadata.get("sampling", {}) if before is not None else {}
        self._as_it_was = {k: v for k, v in known.items() if k in SAMPLING or k == "max_new_tokens"}
        self._base = conv.branch() if place is None else conv.branch_before(place)
        first = next(iter(self._directions.values()))
        depth = len(decoder_layers(who.model))
        layer = getattr(first, "layer", None)
        super().__init__(
            kind="steering",
            name=f"{who.name}, {before.note.removeprefix('· ') if before is not None else 'the next turn'}",
            names=list(self._directions),
            direction=next(iter(self._directions)),
            depth=depth,
            layer=layer if layer is not None else depth // 2,
            plain=self._shown(before) if before is not None else NOBODY | {"author": who.name},
            steered=NOBODY | {"author": who.name, "note": "· steered"},
        )
        self.message: Message | None = before
        """The turn without a push; `None` until there is one."""
        self.steered_message: Message | None = None
        """The turn with the last push."""

    @traitlets.validate("layer")
    def _within(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < self.depth:
            raise traitlets.TraitError(f"layer is 0 to {self.depth - 1} here")
        return int(proposal["value"])

    def edit(self) -> Steer:
        """The push as it is set now."""
        v = self._directions[self.direction]
        return Steer(v, layers=self.layer, site=getattr(v, "site", "resid_post"), coef=self.strength)

    def generate(self) -> bool:
        """Take the turn again with the push, and without where that has not been; `False` while it runs."""
        return self._begin(self._generate)

    def _told(self, content: Mapping[str, Any]) -> None:
        self.stop() if content.get("act") == "stop" else self.generate()

    def _generate(self) -> None:
        if self.message is None:
            self.message = self._take("plain", ())
            if self.message is None:
                return
        edit = self.edit()
        note = f"· steered by {self.strength:g} along {self.direction} at layer {self.layer}"
        self.steered_message = self._take("steered", (edit,), note)

    def _take(self, side: str, edits: tuple[Steer, ...], note: str = "") -> Message | None:
        branch = self._base.branch()
        so_far = NOBODY | {"author": self._who.name, "note": note or "· speaking"}
        try:
            for text in self._heard(branch.stream(self._who, steer=edits, **self._as_it_was)):
                so_far |= {"content": sound(text)}
                setattr(self, side, so_far)
        finally:
            if len(branch.transcript) == len(self._base.transcript):  # stopped, failed, or denied by a hook
                setattr(self, side, so_far | {"note": "· broken off"})
        if len(branch.transcript) == len(self._base.transcript):
            return None
        message: Message = branch.transcript[-1]
        setattr(self, side, self._shown(message) | ({"note": f"{note} {message.note}"} if note else {}))
        return message

    def _shown(self, message: Message) -> dict[str, Any]:
        return block(message, 0)

    def static(self) -> html.Html:
        """Both turns, side by side."""
        sides = [
            html.said(side["author"], side["content"], i, side["note"])
            for i, side in enumerate((self.plain, self.steered))
        ]
        style = "padding:0 16px 0 0;text-align:left;vertical-align:top;width:50%"
        cells = html.tag("tr", *(html.tag("td", side, style=style) for side in sides))
        return html.tag("div", html.tag("b", self.name), html.tag("table", cells))


def _turn_of(conv: Any, who: Participant, turn: int | None) -> tuple[int | None, Message | None]:
    """The place and the message of one of a speaker's turns; `None` where it has not spoken yet."""
    said = [i for i, m in enumerate(conv.transcript) if m.author == who.name]
    if not said and turn is None:
        return None, None
    if not -len(said) <= (turn or 0) < len(said):
        raise LookupError(f"turn {turn} of {who.name} was asked for, of {len(said)}")
    place = said[-1 if turn is None else turn]
    message = conv.transcript[place]
    if message.token_ids is None or message.metadata.get("edited"):
        raise ValueError(f"message {place} is not what {who.name}'s model said: say which turn, turn=…")
    hooked = any(isinstance(h.what, Edit) and h.speaker in (None, who.name) for h in conv.recipe.hooks)
    if message.edits and not hooked:
        raise ValueError(
            f"message {place} was said under an edit of its own (step(steer=…)), which would not be made "
            f"again: choose a turn that was not"
        )
    return place, message


def steering(conv: Any, direction: Any, speaker: Any, turn: int | None) -> Steering:
    """A panel for a turn; `direction` is one, or several by name."""
    named = direction if isinstance(direction, Mapping) else {_name(direction): direction}
    if not named:
        raise ValueError("a steering panel needs a direction, or several by name")
    return Steering(conv, named, speaker, turn)


def _name(direction: Any) -> str:
    return direction.method if isinstance(direction, Direction) else "direction"


# -- chat


class Chat(Panel):
    """A conversation in which a person has a seat: what they say is committed, and the others answer."""

    seat = Unicode().tag(sync=True)
    messages = List(Dict()).tag(sync=True)
    draft = Dict(NOBODY).tag(sync=True)

    def __init__(self, conv: Any, seat: str) -> None:
        self.conv = conv
        super().__init__(kind="chat", name=f"chat as {seat}", seat=seat)
        self._show()

    def say(self, text: str) -> bool:
        """Say something from the seat, and let the others answer; `False` while they speak."""
        if self._running.locked():
            self.error = "they are speaking: what you said was not heard; say it again"
            return False
        self.conv.say(self.seat, text)
        self._show()
        return self.go()

    def go(self) -> bool:
        """Let the others take their turns, until it is the seat's again; `False` while they do."""
        return self._begin(self._answer)

    def _told(self, content: Mapping[str, Any]) -> None:
        act = content.get("act")
        if act == "stop":
            self.stop()
        elif act == "say":
            self.say(str(content.get("text", "")))
        elif act == "go":
            self.go()

    def _answer(self) -> None:
        others = [p for p in self.conv.recipe.participants if not self._seated(p)]
        try:
            for _ in others:
                who = self._next()
                if self._seated(who) or self._stop:
                    break
                self._turn(who)
        finally:
            self.draft = NOBODY
            self._show()

    def _next(self) -> Participant:
        policy = self.conv.recipe.next_speaker
        chosen = policy.choose(self.conv) if hasattr(policy, "choose") else policy(self.conv)
        found: Participant = self.conv.participant(chosen)
        return found

    def _seated(self, who: Participant) -> bool:
        return who.name == self.seat or isinstance(who, HumanParticipant)

    def _turn(self, who: Participant) -> None:
        place = self.conv.transcript.places()
        number = place.get(who.name, len(place))
        for text in self._heard(self.conv.stream(who)):
            self.draft = {"author": who.name, "content": sound(text), "note": "· speaking", "place": number}
        self.draft = NOBODY
        self._show()

    def _show(self) -> None:
        people = [p.name for p in self.conv.recipe.participants]
        seen = [m for m in self.conv.transcript if self.seat not in people or m.heard_by(self.seat)]
        self.messages = entries(seen, self.conv.transcript.places())

    def static(self) -> html.Html:
        """The transcript."""
        return html.Html(self.conv._repr_html_())


def chat(conv: Any, seat: str | None) -> Chat:
    """A chat; the seat is the person's among the participants, or the one that is named."""
    people = [p.name for p in conv.recipe.participants if isinstance(p, HumanParticipant)]
    if seat is None:
        seat = people[0] if people else conv.recipe.moderator_name
    own = [p for p in conv.recipe.participants if p.name == seat]
    if own and not isinstance(own[0], HumanParticipant):
        raise ValueError(f"{seat} is a {type(own[0]).__name__}, not a person's seat; choose another name")
    return Chat(conv, seat)
