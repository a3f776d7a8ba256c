"""Widgets that make a model speak: a turn with and without a push, and a chat in which a person has a seat.

What a click begins runs in a thread of its own, so that a stop is heard; traits tell how it goes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import traitlets
from traitlets import Bool, Dict, Float, Int, List, Unicode

from interlens import html
from interlens.errors import nearest
from interlens.hooks import TurnHook
from interlens.hosted import APIParticipant
from interlens.interp.directions import Direction
from interlens.interp.edits import Edit, Steer
from interlens.interp.sites import READ_ONLY, WHOLE, absolute, decoder_layers, parse
from interlens.message import Message, sound
from interlens.models import SAMPLING, ModelParticipant
from interlens.notebook.widgets import Widget, block, entries
from interlens.participants import HumanParticipant, Participant
from interlens.request import SamplingParams

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
    """One turn of a speaker, and the same again with a push of `strength` along a `direction` at a `layer`.

    Nothing differs but the push: the first click takes the turn without one too. Where that does not give
    what was said (the conversation has another seed, prompt, hook or setting by now), what it gives is shown
    instead, as taken again.
    """

    names = List(Unicode()).tag(sync=True)
    direction = Unicode().tag(sync=True)
    """Choosing one sets `layer` to its own, where it has one, unless a layer was chosen by hand."""
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
        depth = len(decoder_layers(who.model))
        self._places = {name: _place_of(name, d, depth) for name, d in self._directions.items()}
        self._who = who
        self._settings = _settings_of(before) if before is not None else {}
        self._base = _seeded(conv.branch() if place is None else conv.branch_before(place), before)
        first = next(iter(self._directions))
        own = self._places[first][1]
        self._layer = own if own is not None else depth // 2
        """The layer that was not chosen by hand."""
        super().__init__(
            kind="steering",
            name=f"{who.name}, {before.note.removeprefix('· ') if before is not None else 'the next turn'}",
            names=list(self._directions),
            direction=first,
            depth=depth,
            layer=self._layer,
            plain=self._shown(before) if before is not None else NOBODY | {"author": who.name},
            steered=NOBODY | {"author": who.name, "note": "· steered"},
        )
        self.message: Message | None = before
        """The turn without a push; `None` until there is one."""
        self.steered_message: Message | None = None
        """The turn with the last push."""
        self._compared = False

    @traitlets.validate("layer")
    def _within(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < self.depth:
            raise traitlets.TraitError(f"layer is 0 to {self.depth - 1} here")
        return int(proposal["value"])

    @traitlets.validate("direction")
    def _known(self, proposal: Any) -> str:
        name = str(proposal["value"])
        if name not in self._places:
            raise traitlets.TraitError(f"there is no direction {name!r} here: {nearest(name, self._places)}")
        return name

    @traitlets.observe("direction")
    def _at_its_layer(self, change: Any) -> None:
        own = self._places[change["new"]][1]
        if own is not None and self.layer == self._layer:
            self.layer = self._layer = own

    def edit(self) -> Steer:
        """The push as it is set now."""
        site, _ = self._places[self.direction]
        return Steer(self._directions[self.direction], layers=self.layer, site=site, coef=self.strength)

    def generate(self) -> bool:
        """Take the turn again with the push, and at first without; `False` while it runs."""
        return self._begin(self._generate)

    def _told(self, content: Mapping[str, Any]) -> None:
        self.stop() if content.get("act") == "stop" else self.generate()

    def _generate(self) -> None:
        edit = self.edit()
        note = f"· steered by {self.strength:g} along {self.direction} at layer {self.layer}"
        if not self._compared:
            self._compared = self._compare()
        if self._compared:
            self.steered_message = self._take("steered", note, (edit,))

    def _compare(self) -> bool:
        """Take the turn without a push, as it is taken with one; `False` if that was broken off."""
        said = self.message
        if said is None:
            self.message = self._take("plain", "")
            return self.message is not None
        taken = self._take("steered", "· first without a push, to compare", shown=False)
        if taken is None:
            return False
        if (taken.prompt_ids, taken.token_ids) != (said.prompt_ids, said.token_ids):
            self.message = taken
            self.plain = self._shown(taken, "· taken again, as the conversation is now")
        return True

    def _take(
        self, side: str, note: str, edits: tuple[Steer, ...] = (), *, shown: bool = True
    ) -> Message | None:
        branch = self._base.branch()
        so_far = NOBODY | {"author": self._who.name, "note": note or "· speaking"}
        setattr(self, side, so_far)
        try:
            for text in self._heard(branch.stream(self._who, steer=edits, **self._settings)):
                if shown:
                    so_far |= {"content": sound(text)}
                    setattr(self, side, so_far)
        finally:
            if len(branch.transcript) == len(self._base.transcript):  # stopped, failed, or denied by a hook
                setattr(self, side, so_far | {"note": "· broken off"})
        if len(branch.transcript) == len(self._base.transcript):
            return None
        message: Message = branch.transcript[-1]
        if shown:
            setattr(self, side, self._shown(message, note))
        return message

    def _shown(self, message: Message, note: str = "") -> dict[str, Any]:
        return block(message, 0) | {"note": f"{note} {message.note}".strip()}

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
    """The place and the message of a turn; `None` where the speaker has not spoken yet. `turn` counts the
    speaking turns of the conversation, negative from this speaker's last.
    """
    own = [e for e in conv.entries() if e.message.author == who.name]
    if not own and turn is None:
        return None, None
    asked = -1 if turn is None else turn
    found = own[asked : asked + 1 or None] if asked < 0 else [e for e in own if e.turn == asked]
    if not found:
        raise LookupError(f"{who.name} has no turn {asked}; it spoke in the turns {[e.turn for e in own]}")
    [entry] = found
    place, message = entry.index, entry.message
    if message.token_ids is None or message.metadata.get("edited"):
        raise ValueError(f"message {place} is not what {who.name}'s model said: say which turn, turn=…")
    hooked = any(
        isinstance(h.what, Edit | TurnHook) and h.applies(who.name, entry.turn) for h in conv.recipe.hooks
    )
    earlier = [e.message for e in own if e.index < place]
    if not hooked and not _remembered(message, earlier[-1] if earlier else None):
        raise ValueError(
            f"message {place} was said under an edit of its own (step(steer=…)), which would not be made "
            f"again: choose a turn that was not"
        )
    return place, message


def _remembered(message: Message, before: Message | None) -> bool:
    """Whether nothing was edited over a turn but what its speaker's turn before was edited with."""
    known = before.edits if before is not None else ()
    return all(
        any(edit.does_as(old) and edit.where.prompt <= old.where.prompt for old in known)
        for edit in message.edits
    )


def _settings_of(message: Message) -> dict[str, Any]:
    """How a turn was sampled, and how many tokens it might have."""
    known = message.metadata.get("sampling")
    if not known:
        return {}
    idle = {f.name: f.default for f in fields(SamplingParams) if f.name in SAMPLING}  # not recorded
    found = {k: known.get(k, v) for k, v in idle.items()}
    if (cap := known.get("max_new_tokens")) is not None:
        calls = "tool_trail" in message.metadata  # what they took is off the cap of the last generation
        found["max_new_tokens"] = cap + (message.metadata["n_tokens"] - len(message.token_ids or ())) * calls
    return found


def _seeded(base: Any, message: Message | None) -> Any:
    """The branch with the seed that a message tells of itself."""
    seed = message.metadata.get("seed") if message is not None else None
    more = seed - base.chance.job if isinstance(seed, int) else 0
    return base.seed(base.recipe.seed + more) if more else base


def _place_of(name: str, direction: Any, depth: int) -> tuple[str, int | None]:
    """The site of a direction and its layer, where it has one, in a model of `depth` layers."""
    site, layer = getattr(direction, "site", None) or "resid_post", getattr(direction, "layer", None)
    if site in WHOLE or site.partition(".")[0] in READ_ONLY:
        raise ValueError(
            f"the direction {name!r} is at {site}, and a panel pushes at a site that every layer has, as "
            f"resid_post: choose another, or take conv.step(speaker, steer=Steer(direction))"
        )
    [(site, layer)] = parse(site, None if layer is None else (layer,))
    return site, None if layer is None else absolute(site, layer, depth)


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
