"""Pictures with matplotlib: functions take and return `Axes`, on a white background."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlens.interp.capture import Activation, Activations, vector_of

if TYPE_CHECKING:
    import pandas
    import torch
    from matplotlib.axes import Axes


def similarity(
    acts: Activations, *, layer: int, site: str = "resid_post", centred: bool = True, ax: Any = None
) -> "Axes":
    """Cosine between the mean activations of every two turns at a layer; position 0 is left out.

    `centred` subtracts the mean over the turns first: what all turns share (most of it) would hide the rest.
    """
    import matplotlib.pyplot as plt

    found = sorted(acts.query(layer=layer, site=site), key=lambda a: a.turn)
    if not found:
        raise LookupError(f'nothing was captured at "{site}.{layer}"; there is {acts!r}')
    means = _stack([a.beyond_first().float().mean(0) for a in found])
    if centred:
        means = means - means.mean(0)
    unit = means / means.norm(dim=-1, keepdim=True)
    values = (unit @ unit.T).numpy()
    ax = ax if ax is not None else plt.subplots(layout="constrained")[1]
    image = ax.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
    labels = [f"{a.participant} {a.turn}" for a in found]
    ax.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    ax.set_yticks(range(len(labels)), labels)
    for i in range(len(labels)):
        for j in range(len(labels)):
            shade = "white" if abs(values[i, j]) > 0.6 else "black"
            ax.text(j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=8, color=shade)
    ax.set_title(
        f"{site}.{acts.query(layer=layer)[0].layer}: cosine of turns" + (", centred" if centred else "")
    )
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    return ax  # type: ignore[no-any-return]


def norms(acts: Activations, *, site: str = "resid_post", ax: Any = None) -> "Axes":
    """Length of the activation at each position of the last captured turn, one line per layer (log scale)."""
    import matplotlib.pyplot as plt

    found = acts.query(site=site, turn=-1)
    if not found:
        raise LookupError(f'nothing was captured at "{site}"; there is {acts!r}')
    if _signed(found):
        raise ValueError(
            f'"{site}" was captured as projections h·u, which have no length: draw them with heatmap, or '
            f"capture vectors, without reduce="
        )
    ax = ax if ax is not None else plt.subplots(layout="constrained")[1]
    for a in sorted(found, key=lambda a: a.layer):
        ax.plot(a.positions, a.tensor.float().norm(dim=-1).numpy(), label=f"{a.site}.{a.layer}")
    ax.set_yscale("log")
    ax.set_xlabel(f"token position in {found[0].participant}'s view, turn {found[0].turn}")
    ax.set_ylabel("norm")
    ax.legend()
    return ax  # type: ignore[no-any-return]


def heatmap(
    acts: Activations,
    *,
    direction: Any = None,
    turn: int = -1,
    site: str = "resid_post",
    tokens: Sequence[str] | None = None,
    ax: Any = None,
) -> "Axes":
    """Layer by token: the length of the activation, or its projection h.u, centred at 0, on a `direction` or
    on the one that it was captured along (`reduce=direction`).

    Rows are the captured layers, from the bottom up; columns the positions of one turn's view, the same in
    all layers, or `tokens`, one for each. Position 0, which is of another size than all others, is left
    out of the colour scale.
    """
    found = sorted(acts.query(site=site, turn=turn), key=lambda a: a.layer)
    if not found:
        raise LookupError(f'nothing was captured at "{site}" in turn {turn}; there is {acts!r}')
    projected = _signed(found)
    if projected and direction is not None:
        raise ValueError(
            "these activations are projections already, on the direction of their capture: leave direction "
            "out, or capture vectors, without reduce="
        )
    _same_positions(found)
    signed = projected or direction is not None
    values = _stack([_by_position(a, direction) for a in found])
    kept = values[:, [i for i, p in enumerate(found[0].positions) if p > 0] or slice(None)]
    ax, image = _image(values.numpy(), signed=signed, top=float(kept.abs().max()), ax=ax)
    _few(ax.xaxis, _labels(tokens, found[0].positions))
    ax.set_yticks(range(len(found)), [a.layer for a in found])
    ax.set_xlabel(f"token position in {found[0].participant}'s view, turn {found[0].turn}")
    ax.set_ylabel("layer")
    ax.figure.colorbar(image, ax=ax, label="h·u" if signed else "norm")
    return ax  # type: ignore[no-any-return]


def trace(frame: "pandas.DataFrame", *, value: str = "projection", ax: Any = None) -> "Axes":
    """A value by message, one line for each who reads it, marked by who said it; `frame` is that of
    `conv.project`.
    """
    ax = _axes(ax)
    for reader, part in frame.groupby("reader") if "reader" in frame else [("", frame)]:
        ax.plot(part["message"], part[value], marker="o", label="read by " + str(reader) if reader else None)
    told = frame.drop_duplicates("message")
    said: list[tuple[int, str]] = list(zip(told["message"], told["author"], strict=True))
    labels = [f"{message}\n{author}" for message, author in said]
    ax.set_xticks(list(told["message"]), labels)
    ax.axhline(0, color="0.7", linewidth=1, zorder=0)
    ax.set_xlabel("message")
    ax.set_ylabel(value)
    if "reader" in frame:
        ax.legend()
    return ax  # type: ignore[no-any-return]


def probes(frame: "pandas.DataFrame", *, ax: Any = None) -> "Axes":
    """Accuracy of a probe by layer with its standard error, and with shuffled labels; `frame` is that of
    `probes.sweep`.
    """
    ax = _axes(ax)
    ax.errorbar(frame["layer"], frame["accuracy"], yerr=frame["sem"], marker="o", capsize=2, label="probe")
    ax.plot(frame["layer"], frame["shuffled"], marker="x", color="0.5", label="shuffled labels")
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("layer")
    ax.set_ylabel("accuracy on held-out folds")
    ax.legend()
    return ax  # type: ignore[no-any-return]


def grid(frame: "pandas.DataFrame", *, tokens: Sequence[str] | None = None, ax: Any = None) -> "Axes":
    """A patching grid: layer by position, 1 where the patch recovers all of the metric, 0 where nothing."""
    top = max(1.0, float(abs(frame.to_numpy()).max()))
    ax, image = _image(frame.to_numpy(), signed=True, top=top, ax=ax)
    ax.set_yticks(range(len(frame)), list(frame.index))
    _few(ax.xaxis, _labels(tokens, list(frame.columns)))
    ax.set_ylabel("layer")
    ax.set_xlabel("position")
    ax.figure.colorbar(image, ax=ax, label="share recovered")
    return ax  # type: ignore[no-any-return]


def attention(
    pattern: Any, *, tokens: Sequence[str] | None = None, layer: int = 0, head: int = 0, ax: Any = None
) -> "Axes":
    """Who attends to whom: queries down, keys across; `pattern` is `[layers, heads, queries, keys]` of
    `interlens.attention`, or `[queries, keys]`.
    """
    values = pattern[layer, head] if pattern.ndim == 4 else pattern
    ax, image = _image(values.float().numpy(), signed=False, top=1.0, ax=ax, origin="upper")
    if tokens is not None:
        queries, keys = values.shape
        labels = _labels(tokens, range(keys))
        _few(ax.xaxis, labels)
        if queries == keys:
            _few(ax.yaxis, labels)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    ax.figure.colorbar(image, ax=ax, label="probability")
    return ax  # type: ignore[no-any-return]


def budget(frame: "pandas.DataFrame", *, ax: Any = None) -> "Axes":
    """Success against tokens: columns `tokens`, `success` (0 to 1), `arm`, and perhaps `low` and `high`, the
    ends of an interval.
    """
    ax = _axes(ax)
    for arm, part in frame.sort_values("tokens").groupby("arm"):
        [line] = ax.plot(part["tokens"], part["success"], marker="o", label=str(arm))
        if "low" in part and len(part) > 1:
            ax.fill_between(part["tokens"], part["low"], part["high"], alpha=0.15, color=line.get_color())
        elif "low" in part:
            ax.vlines(part["tokens"], part["low"], part["high"], color=line.get_color())
    ax.set_ylim(-0.02, 1.02)
    ax.set_xlabel("tokens spent per conversation")
    ax.set_ylabel("success")
    ax.legend()
    return ax  # type: ignore[no-any-return]


def dose(frame: "pandas.DataFrame", *, value: str = "score", ax: Any = None) -> "Axes":
    """Steering: a score against the coefficient, one line for each `arm` (the direction, and its random
    controls, in grey); columns `coef`, `arm`, and the value, of which there may be many for a coefficient.
    """
    ax = _axes(ax)
    markers = iter("xs^vD+*" * len(frame))
    for arm, part in frame.groupby("arm"):
        mean, sem = (getattr(part.groupby("coef")[value], how)() for how in ("mean", "sem"))
        looks: dict[str, Any] = {"marker": "o"}
        if str(arm).startswith(("random", "control")):
            looks = {"marker": next(markers), "color": "0.6", "linestyle": "--"}
        ax.errorbar(mean.index, mean, yerr=sem.fillna(0.0), capsize=2, label=str(arm), **looks)
    ax.axvline(0, color="0.8", linewidth=1, zorder=0)
    ax.set_xlabel("coefficient")
    ax.set_ylabel(value)
    ax.legend()
    return ax  # type: ignore[no-any-return]


def _axes(ax: Any) -> Any:
    import matplotlib.pyplot as plt

    return ax if ax is not None else plt.subplots(layout="constrained")[1]


def _image(values: Any, *, signed: bool, top: float, ax: Any, origin: str = "lower") -> tuple[Any, Any]:
    """An image with a scale that is centred at 0 where values have a sign."""
    ax = _axes(ax)
    colours, low = ("RdBu_r", -top) if signed else ("Blues", 0.0)
    shape: dict[str, Any] = {"aspect": "auto", "origin": origin, "interpolation": "nearest"}
    return ax, ax.imshow(values, cmap=colours, vmin=low, vmax=top or 1.0, **shape)


def _few(axis: Any, labels: Sequence[Any]) -> None:
    """At most thirty labels on an axis, evenly spaced."""
    every = -(-len(labels) // 30)
    upright = axis.axis_name == "x" and any(len(str(label)) > 2 for label in labels)
    axis.set_ticks(range(0, len(labels), every), labels[::every], rotation=90 if upright else 0, fontsize=8)


def _labels(tokens: Sequence[str] | None, positions: Sequence[Any]) -> list[Any]:
    """Tokens, if they are given, one for each position."""
    if tokens is None:
        return list(positions)
    if len(tokens) != len(positions):
        raise ValueError(f"{len(tokens)} tokens were given for {len(positions)} positions: give one for each")
    return [_shown(t) for t in tokens]


def _shown(token: str) -> str:
    """A token as it is written in a label: a space is a dot."""
    return token.replace(" ", "·").replace("\n", "⏎")


def _signed(found: Sequence[Activation]) -> bool:
    """Whether these are projections, which have a sign, or else vectors; means are neither."""
    if any(a.reduce == "mean" for a in found):
        raise ValueError(
            "a mean over positions has no number for each of them: capture every position, without "
            'reduce="mean"'
        )
    kinds = {a.reduce == "projection" for a in found}
    if len(kinds) > 1:
        raise ValueError(
            f"{found[0].site} was captured both as vectors and as projections h·u: capture one kind to draw"
        )
    return kinds == {True}


def _same_positions(found: Sequence[Activation]) -> None:
    first = found[0]
    for a in found:
        if a.positions != first.positions:
            one, other = (
                f"layer {x.layer} at {len(x.positions)} ({x.positions[0]} to {x.positions[-1]})"
                for x in (first, a)
            )
            raise ValueError(
                f"the layers were captured at different positions, {one} and {other}, and a column of a heat "
                f"map is one position: capture all layers with one span"
            )


def _by_position(a: Activation, direction: Any) -> "torch.Tensor":
    """The projection on a direction, or one that was captured, or else the length, `[positions]`."""
    if a.reduce == "projection":
        return a.tensor.float()[:, 0]
    if direction is None:
        length: torch.Tensor = a.tensor.float().norm(dim=-1)
        return length
    along = vector_of(direction)
    if len(along) != a.tensor.shape[-1]:
        raise ValueError(
            f"the direction has {len(along)} numbers, and {a.site}.{a.layer} has {a.tensor.shape[-1]}: give "
            f"a direction of this model and site"
        )
    projection: torch.Tensor = a.tensor.float() @ (along / along.norm())
    return projection


def _stack(tensors: "list[torch.Tensor]") -> "torch.Tensor":
    import torch

    return torch.stack(tensors)
