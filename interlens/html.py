"""The only place that makes HTML: text and attributes are escaped, styles are inline.

Nothing here emits `<style>`, `<script>`, `<svg>`, `id` or `data-*`, so that a picture reads the same in a
live, a saved, an untrusted and an exported notebook.
"""

import html as _escape
from collections.abc import Callable, Iterable
from typing import Any


class Html(str):
    """Markup that is already safe; everything else is escaped when it becomes a child."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escape any value to text; halves of characters, which no page can hold, become question marks."""
    return Html(_escape.escape(str(value), quote=True).encode("utf-8", "replace").decode())


_BLOCKS = frozenset({"div", "details", "table", "body"})
_WORDS = "mathjax_ignore tex2jax_ignore"
"""Classes that keep MathJax 3 and 2, which notebooks run over outputs, from typesetting what `$` encloses."""


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Make one element; `class_` becomes class, `None` attributes are left out, children are escaped unless
    `Html`.

    What is in a block is words, never mathematics: dollar signs stay what they are.

    >>> tag("b", "<x>", title='a"b')
    '<b title="a&quot;b">&lt;x&gt;</b>'
    """
    if name in _BLOCKS:
        attributes = {"class_": _WORDS, **attributes}
    pairs = (
        f' {key.rstrip("_")}="{text(value)}"' if value is not True else f" {key.rstrip('_')}"
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = "".join(child if isinstance(child, Html) else text(child) for child in children)
    if name in _BLOCKS:
        inner = inner.replace(f' class="{_WORDS}"', "")  # the outermost says it for all
    return Html(f"<{name}{''.join(pairs)}>{inner}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Join parts, escaping those that are not `Html`."""
    return Html(between.join(p if isinstance(p, Html) else text(p) for p in parts))


def table(rows: Iterable[Iterable[object]], head: Iterable[object]) -> Html:
    """A plain table that carries its own, theme-neutral style."""
    cell = "padding:2px 10px 2px 0;text-align:left;vertical-align:top;white-space:pre-wrap"
    header = tag(
        "tr", *(tag("th", h, style=cell + ";border-bottom:1px solid rgba(128,128,128,.5)") for h in head)
    )
    body = join(tag("tr", *(tag("td", c, style=cell) for c in row)) for row in rows)
    return tag("table", header, body, style="border-collapse:collapse;font-size:90%")


def frame(table_of: Any) -> Html:
    """A pandas table as one of ours: no index, numbers with four digits."""
    rows = table_of.itertuples(index=False, name=None)
    shown = ([f"{v:.4g}" if isinstance(v, float) else v for v in row] for row in rows)
    return table(shown, table_of.columns)


def fold(summary: object, *children: object, open: bool = False) -> Html:
    """A `<details>` block; the triangle is asked for by style, since some notebook front ends drop it."""
    head = tag("summary", summary, style="display:list-item;cursor:pointer")
    return tag("details", head, *children, open=open or None)


_BORDERS = ("#2563eb", "#dc501e", "#0f766e", "#9333ea", "#a16207", "#64748b")


def said(author: str, content: str, place: int = 0, note: str = "") -> Html:
    """One message: the author's name in words and as a coloured border, the text as it is."""
    border = f"border-left:3px solid {_BORDERS[place % len(_BORDERS)]};padding:0 0 0 10px;margin:8px 0"
    small = tag("span", f" {note}", style="opacity:.75;font-size:85%") if note else Html("")
    words = tag("div", content, style="white-space:pre-wrap;overflow-wrap:anywhere")
    return tag("div", tag("div", tag("b", author), small), words, style=border)


def clipped(content: str, most: int = 200_000) -> str:
    """A long text without its middle."""
    if len(content) <= most:
        return content
    half = most // 2
    return f"{content[:half]}\n… {len(content) - 2 * half:,} characters hidden …\n{content[-half:]}"


def listing(n: int, block: Callable[[int], Html], *, shown: int = 20, limit: int = 800_000) -> Html:
    """Blocks 0 to n - 1, of which the last `shown` are open and earlier ones folded. What would make it
    larger than `limit` characters is left out, and it says so; `save_html` leaves nothing out.
    """
    recent: list[Html] = []
    older: list[Html] = []
    room = limit
    for i in reversed(range(n)):
        made = block(i)
        room -= len(made)
        if room < 0 and recent:
            break
        (recent if len(recent) < shown else older).append(made)
    hidden = n - len(recent) - len(older)
    parts = []
    if hidden:
        parts.append(block(0))
        parts.append(tag("p", f"… {hidden - 1} messages hidden; save_html(path) writes all of them"))
    if older:
        parts.append(fold(f"{len(older)} earlier messages", *reversed(older)))
    return tag("div", *parts, *reversed(recent))


LEVELS = 8
"""Steps of colour on each side of the middle."""
_BLUE, _ORANGE = "37,99,235", "220,80,30"


def level(value: float | None) -> int | None:
    """A value from -1 to 1 (others are cut off) as a step of colour; `None` for none, and for what is no
    number.
    """
    if value is None or value != value:
        return None
    return round(max(-1.0, min(1.0, value)) * LEVELS)


def shaded(pieces: Iterable[tuple[str, int | None, str | None]]) -> Html:
    """Words on blue (levels above 0) and orange (below), each with its title; equal neighbours are one."""
    out: list[Html] = []
    held: list[str] = []
    last: tuple[int | None, str | None] = (None, None)

    def flush() -> None:
        if held:
            content = text("".join(held))
            out.append(content if last == (None, None) else _shade(content, *last))
            held.clear()

    for words, step, title in pieces:
        if (step, title) != last:
            flush()
            last = (step, title)
        held.append(words)
    flush()
    return join(out)


def _shade(content: Html, step: int | None, title: str | None) -> Html:
    style = None
    if step:
        style = f"background:rgba({_BLUE if step > 0 else _ORANGE},{0.55 * abs(step) / LEVELS:.2f})"
    return tag("span", content, style=style, title=title)


def page(title: str, *children: object) -> str:
    """One self-contained file, readable without scripts, light or dark."""
    style = (
        "font-family:system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;line-height:1.45;"
        "color-scheme:light dark"
    )
    head = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">') + tag(
        "title", title
    )
    body = tag("body", *children, style=style)
    return "<!doctype html>\n" + tag("html", Html(tag("head", Html(head)) + body), lang="en")
