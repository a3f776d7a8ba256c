"""Widgets to look with: tokens by layer, and the jobs of a run. Each is a static picture where nothing runs.

The numbers and words are in synced traits, so that a view that is opened late shows all of them; a front end
makes text of them as text only.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from traitlets import Bool, Bytes, Dict, Float, Int, List, Unicode

from interlens import html
from interlens.message import Message, sound
from interlens.notebook.tint import Shades, Tinted, captured, listed
from interlens.runner.results import RunResult

MOST_NUMBERS = 4_000_000
"""Tokens times layers that one widget shows: 16 MB."""
WORDS = 5_000
"""Up to so many jobs their words and analyses are read, to be searched and sorted by."""
PAGE = 50
OWN = ("job", "outcome", "tokens", "analysis_failed", "odd", "attempts")
"""What is known of a job beside its analysis."""
WORDS_OF = ""
"""Where a job's words are among its facts: a name that no analysis has."""


class Widget(anywidget.AnyWidget):
    """What all have: one module for the front end, and a picture that stays where no kernel runs."""

    _esm = Path(__file__).parent / "static" / "widgets.js"
    kind = Unicode().tag(sync=True)
    name = Unicode().tag(sync=True)
    error = Unicode().tag(sync=True)

    def static(self) -> html.Html:
        """What is shown where the widget cannot run."""
        return html.text(self.name)

    def _repr_mimebundle_(self, **given: Any) -> Any:
        found = super()._repr_mimebundle_(**given)
        data, metadata = found if isinstance(found, tuple) else (found, {})
        return {**(data or {}), "text/html": str(self.static())}, metadata

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def block(message: Message, place: int) -> dict[str, Any]:
    """A message for the front end."""
    content = sound(html.clipped(message.content))
    return {"author": sound(message.author), "content": content, "note": message.note, "place": place}


# -- explore


class Explore(Widget):
    """Tokens with a number for each layer: move `layer`, pin tokens, filter by speaker."""

    layers = List(Int()).tag(sync=True)
    layer = Int(0).tag(sync=True)
    """Which of `layers` is shown: its place in the list."""
    speaker = Unicode("").tag(sync=True)
    pinned = List(Int()).tag(sync=True)
    """Tokens, numbered through all messages."""
    messages = List(Dict()).tag(sync=True)
    values = Bytes().tag(sync=True)
    """fp32 `[layers, tokens]`, NaN where there is none."""
    tops = List(Float()).tag(sync=True)

    def __init__(self, tinted: Mapping[int, Tinted], places: Mapping[str, int], name: str) -> None:
        import numpy as np

        self._tinted = dict(tinted)
        first = next(iter(tinted.values())).shades
        count = sum(len(s.tokens) for s in first)
        if count * len(tinted) > MOST_NUMBERS:
            raise ValueError(
                f"{count:,} tokens in {len(tinted)} layers are more numbers than a page can hold "
                f"({MOST_NUMBERS:,}): take fewer layers, or acts.query(turn=…)"
            )
        numbers = np.array(
            [[math.nan if v is None else v for s in t.shades for v in s.values] for t in tinted.values()],
            dtype="<f4",
        )
        self._numbers = numbers
        blocks, start = [], 0
        for s in first:
            blocks.append(_shown(s, start, places[s.author]))
            start += len(s.tokens)
        super().__init__(
            kind="explore",
            name=name,
            layers=list(tinted),
            messages=blocks,
            values=numbers.tobytes(),
            tops=[t.top for t in tinted.values()],
        )

    @traitlets.validate("layer")
    def _within(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < max(1, len(self.layers)):
            raise traitlets.TraitError(f"layer is a place in layers, 0 to {len(self.layers) - 1}")
        return int(proposal["value"])

    def frame(self) -> Any:
        """The pinned tokens by layer, `[layers, pinned]`."""
        import pandas

        texts = [text for m in self.messages for text in m["tokens"]]
        columns = [f"{token}: {texts[token]}" for token in self.pinned]
        index = pandas.Index(self.layers, name="layer")
        return pandas.DataFrame(self._numbers[:, list(self.pinned)], index=index, columns=columns)

    def static(self) -> html.Html:
        """The layer that is chosen now."""
        tinted = self._tinted[self.layers[self.layer]]
        return html.tag("div", html.tag("b", self.name), html.Html(tinted._repr_html_()))


def _shown(s: Shades, start: int, place: int) -> dict[str, Any]:
    tokens = [sound(t) for t in s.tokens]
    return {"author": sound(s.author), "note": s.note, "tokens": tokens, "start": start, "place": place}


def explore(conv: Any, acts: Any, along: Any) -> Explore:
    """Look at what turns captured, layer by layer; see `Conversation.explore`."""
    if (found := listed(acts)) is None:
        raise TypeError(f"explore takes activations, as conv.capture() gives them; got {acts!r}")
    sites = sorted({a.site for a in found})
    if not sites:
        raise ValueError(
            "explore takes activations of one site, and there are none: nothing was captured, or nothing "
            "matched what was asked for"
        )
    if len(sites) > 1:
        raise ValueError(
            f"explore takes activations of one site, and there are {', '.join(sites)}: take one, as "
            f'acts.query(site="{sites[0]}")'
        )
    layers = sorted({a.layer for a in found})
    what = "h·u" if along is not None or any(a.tensor.shape[-1] == 1 for a in found) else "norm"
    tinted = {n: captured(conv, [a for a in found if a.layer == n], along, norms=True) for n in layers}
    sizes = {tuple(len(s.tokens) for s in t.shades) for t in tinted.values()}
    if len(sizes) > 1:
        raise ValueError("some turns were captured in other layers than others: explore those of one kind")
    return Explore(tinted, conv.transcript.places(), f"{sites[0]}, {what}")


# -- browse


class Browse(Widget):
    """The jobs of a run: search, sort, filter by outcome, and read what was said."""

    counts = Dict().tag(sync=True)
    columns = List(Unicode()).tag(sync=True)
    searches = Unicode().tag(sync=True)
    query = Unicode("").tag(sync=True)
    outcome = Unicode("").tag(sync=True)
    sort = Unicode("").tag(sync=True)
    descending = Bool(False).tag(sync=True)
    page = Int(0).tag(sync=True)
    page_size = Int(PAGE).tag(sync=True)
    found = Int(0).tag(sync=True)
    rows: Any = List().tag(sync=True)
    selected = Unicode("").tag(sync=True)
    transcript = Dict().tag(sync=True)

    def __init__(self, report: Any) -> None:
        self._report = report
        self._deep = len(report.results) <= WORDS
        self._facts = _facts(report, self._deep)
        own = list(dict.fromkeys(k for fact in self._facts for k in fact if k != WORDS_OF))
        self._listed: list[dict[str, Any]] = []
        super().__init__(
            kind="browse",
            name=repr(report),
            counts={k: n for k, n in report.counts().items() if n},
            columns=own or ["job"],
            searches="search ids and words" if self._deep else "search ids",
            transcript={"title": "", "messages": [], "notes": []},
        )
        self._list()
        self.observe(lambda change: self._list(), ["query", "outcome", "sort", "descending", "page"])
        self.observe(lambda change: self._read(), ["selected"])
        self.on_msg(lambda widget, content, buffers: self.next(content.get("next", "failed")))

    def next(self, outcome: str = "failed") -> None:
        """Read the next job, of those that are listed, that ended so; after the last comes the first."""
        wanted = [i for i, fact in enumerate(self._listed) if fact["outcome"] == outcome]
        if not wanted:
            return
        now = next((i for i, fact in enumerate(self._listed) if fact["job"] == self.selected), -1)
        at = next((i for i in wanted if i > now), wanted[0])
        self.page = at // PAGE
        self.selected = self._listed[at]["job"]

    def _list(self) -> None:
        text = self.query.strip().casefold()
        found = [
            fact
            for fact in self._facts
            if (not self.outcome or _fits(fact, self.outcome))
            and (not text or text in fact["job"].casefold() or text in fact.get(WORDS_OF, ""))
        ]
        if self.sort:
            known = [fact for fact in found if _known(fact.get(self.sort))]
            known.sort(key=lambda fact: _order(fact[self.sort]), reverse=self.descending)
            found = [*known, *(fact for fact in found if not _known(fact.get(self.sort)))]
        self._listed = found
        last = max(0, (len(found) - 1) // PAGE)
        with self.hold_trait_notifications():
            self.found = len(found)
            if self.page > last:
                self.page = last
            shown = found[self.page * PAGE : (self.page + 1) * PAGE]
            self.rows = [[fact.get(name) for name in self.columns] for fact in shown]

    def _read(self) -> None:
        try:
            self.transcript = self._words(self._report.results.get(self.selected))
        except OSError as error:
            self.transcript = {"title": f"cannot be read: {error}", "messages": [], "notes": []}

    def _words(self, result: RunResult | None) -> dict[str, Any]:
        if result is None:
            return {"title": f"there is no job {self.selected}", "messages": [], "notes": []}
        places = result.transcript.places()
        notes = [] if result.analysis is None else [f"analysis: {sound(str(result.analysis))}"]
        notes += [sound(result.error)] if result.error is not None else []
        blocks = [block(m, places[m.author]) for m in result.transcript]
        return {"title": repr(result), "messages": blocks, "notes": notes}

    def static(self) -> html.Html:
        """The report's own picture."""
        return html.Html(self._report._repr_html_())


def _facts(report: Any, deep: bool) -> list[dict[str, Any]]:
    """What each job can be found and sorted by."""
    facts: list[dict[str, Any]] = []
    for job, kind, tokens in zip(report.results, report.results.kinds(), report.results.sizes(), strict=True):
        fact: dict[str, Any] = {"job": job, "outcome": kind.outcome, "tokens": tokens}
        if kind.analyses_failed:
            fact["analysis_failed"] = kind.analyses_failed
        if kind.odd:
            fact["odd"] = kind.odd
        if kind.attempts > 1:
            fact["attempts"] = kind.attempts
        facts.append(fact)
    for fact, result in zip(facts, report.results.values() if deep else (), strict=deep):
        analysis = result.analysis
        named = analysis if isinstance(analysis, Mapping) else {"analysis": analysis}
        for key, value in named.items():
            if isinstance(value, str | int | float | bool):
                name = sound(str(key))
                fact[f"analysis.{name}" if name in OWN else name] = (
                    sound(value) if isinstance(value, str) else value
                )
        fact[WORDS_OF] = "\n".join(m["content"] for m in result.record["transcript"]).casefold()
    return facts


def _fits(fact: Mapping[str, Any], outcome: str) -> bool:
    return bool(fact["outcome"] == outcome or (outcome == "analysis_failed" and fact.get(outcome)))


def _known(value: Any) -> bool:
    return value is not None and value == value


def _order(value: Any) -> tuple[int, Any]:
    """Numbers before words."""
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def entries(messages: Sequence[Message], places: Mapping[str, int]) -> list[dict[str, Any]]:
    """Messages for the front end."""
    return [block(m, places[m.author]) for m in messages]
