"""Directions in activation space: made from a contrast, compared with random ones, read from other files.

A direction keeps the scale it was made with: nothing is normalised behind its user's back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlens import html
from interlens.errors import StoreError
from interlens.interp import stored
from interlens.interp.capture import Activation, Activations, Capture, vector_of
from interlens.interp.probes import Probe
from interlens.interp.sites import WHOLE

if TYPE_CHECKING:
    import torch

Method = Literal["mean", "pca", "logistic"]


@dataclass(frozen=True, eq=False)
class Direction:
    """A vector `[d]` with the place it belongs to."""

    vector: "torch.Tensor"
    site: str = "resid_post"
    layer: int | None = None
    method: str = "given"
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known: how many examples, which model, which seed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", vector_of(self.vector))

    @classmethod
    def from_contrast(
        cls,
        a: Any,
        b: Any,
        *,
        method: Method = "mean",
        site: str = "resid_post",
        layer: int | None = None,
        participant: Any = None,
    ) -> "Direction":
        """From examples of `b` towards those of `a`: activations `[n, d]`, `Activations`, reports or
        conversations that captured some, or texts, which `participant` reads (the mean over each text).
        What was captured at position 0, the attention sink, is left out where a side has other positions;
        `facts` say of how many rows.

        `mean`: mean(a) - mean(b) (Marks and Tegmark 2023, section 5). `pca`: the first principal component of
        the differences from the common mean (Zou et al. 2023, section 3.1). `logistic`: the weights of a
        logistic regression on standardised numbers. The last two are given the sign and the length that
        mean(a) - mean(b) has along them, so that coefficients can be compared.
        """
        import torch

        if layer is None and len(layers := sorted(_layers(a, site) | _layers(b, site))) > 1:
            raise ValueError(f"{site} was captured in the layers {layers}: say which, layer={layers[0]}")
        if layer is None and layers:
            [layer] = layers
        (x, x_first), (y, y_first) = (rows_of(side, site, layer, participant) for side in (a, b))
        x, y = x.float(), y.float()
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"one side has {x.shape[1]} numbers per example, the other {y.shape[1]}")
        gap = x.mean(0) - y.mean(0)
        if method == "mean":
            vector = gap
        elif method in ("pca", "logistic"):
            unit = _component(torch.cat([x, y])) if method == "pca" else _weights(x, y)
            vector = (gap @ unit) * unit
        else:
            raise ValueError(f'method is "mean", "pca" or "logistic"; got {method!r}')
        facts: dict[str, Any] = {"a": len(x), "b": len(y)}
        if x_first or y_first:
            facts["without_position_0"] = {"a": x_first, "b": y_first}
        return cls(vector, site, layer, method, facts)

    def random_like(self, seed: int = 0) -> "Direction":
        """A random direction of the same length: the control that a finding about this one needs."""
        import torch

        noise = torch.randn(len(self.vector), generator=torch.Generator().manual_seed(seed))
        vector = noise * (self.vector.norm() / noise.norm())
        return replace(self, vector=vector, method="random", facts={"seed": seed})

    @property
    def norm(self) -> float:
        """|v|."""
        return float(self.vector.norm())

    def project(self, activations: Any) -> "torch.Tensor":
        """h.u for activations `[…, d]`, with u = v / |v|: `[…]`, in the activations' own units."""
        import torch

        return torch.as_tensor(activations).float() @ (self.vector / self.vector.norm())

    def cosine(self, other: "Direction | torch.Tensor") -> float:
        """The cosine with another direction."""
        v = vector_of(other)
        return float(self.vector @ v / (self.vector.norm() * v.norm()))

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with the vector and, in its header, everything else."""
        rest = {"site": self.site, "layer": self.layer, "method": self.method, "facts": self.facts}
        stored.write(path, "direction", {"vector": self.vector}, rest)

    @classmethod
    def load(cls, path: str | Path) -> "Direction":
        """Read what `save` wrote."""
        tensors, rest = stored.read(path, "direction")
        return cls(tensors["vector"], **rest)

    @classmethod
    def from_gguf(cls, path: str | Path, layer: int) -> "Direction":
        """One layer of a control vector as repeng and llama.cpp write it: `direction.N` is added to the
        output of layer N.
        """
        import torch
        from gguf import GGUFReader

        tensors = {t.name: t.data for t in GGUFReader(str(path)).tensors}
        if f"direction.{layer}" not in tensors:
            there = sorted(int(n.split(".")[1]) for n in tensors if n.startswith("direction."))
            raise StoreError(f"{path} has no direction for layer {layer}; it has {there}")
        return cls(torch.tensor(tensors[f"direction.{layer}"]), "resid_post", layer, "gguf")

    @classmethod
    def from_persona(cls, path: str | Path, layer: int) -> "Direction":
        """One layer of a persona vector's `.pt`, `[layers + 1, d]` by `hidden_states` index: row L + 1 is
        `resid_post.L` (row 0 is the embeddings).
        """
        import torch

        rows = torch.load(str(path), weights_only=True)
        if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
            raise StoreError(f"{path} holds no tensor [layers + 1, d]")
        n = len(rows) - 1
        if not -n <= layer < n:
            raise StoreError(f"{path} is of a model of {n} layers (0-{n - 1}); layer {layer} was asked for")
        return cls(rows[layer % n + 1], "resid_post", layer % n, "persona")

    def _repr_html_(self) -> str:
        facts = [["method", self.method], *self.facts.items()]
        return html.tag("div", html.tag("b", repr(self)), html.table(facts, ["", ""]))

    def __repr__(self) -> str:
        where = self.site if self.layer is None else f"{self.site}.{self.layer}"
        return f"Direction({where}, d={len(self.vector)}, |v|={self.norm:.3g}, by {self.method})"


def rows_of(side: Any, site: str, layer: int | None, participant: Any = None) -> tuple["torch.Tensor", int]:
    """Examples as `[n, d]`, one per position of what was captured or per text, and how many rows of position
    0 were left out, which are dropped where there are others.
    """
    import torch

    if isinstance(side, torch.Tensor):
        return (side[None] if side.dim() == 1 else side), 0
    if (found := _captured(side, site, layer)) is None:
        items: list[Any] = [side] if isinstance(side, str) else list(side)
        if items and all(isinstance(i, str) for i in items):
            return _read(items, site, layer, participant), 0
        if items and all(isinstance(i, Activation) for i in items):
            found = _at(Activations(items), site, layer)
        elif items and all(hasattr(i, "transcript") for i in items):
            found = _joined([_spoken(i, site, layer) for i in items])
        else:
            return torch.as_tensor(side), 0
    rows, first = found
    rest = [i for i, of_first in enumerate(first) if not of_first]
    return (rows[rest], len(rows) - len(rest)) if 0 < len(rest) < len(rows) else (rows, 0)


def _layers(side: Any, site: str) -> set[int]:
    """The layers of what was captured at a site."""
    if isinstance(side, Activation):
        return {side.layer} if side.site == site else set()
    if hasattr(side, "transcript"):
        side = [m.activations or () for m in side.transcript]
    if isinstance(side, Activations | list | tuple):
        return {layer for item in side for layer in _layers(item, site)}
    return set()


def _captured(side: Any, site: str, layer: int | None) -> "tuple[torch.Tensor, list[bool]] | None":
    """The rows that one thing captured, `[n, d]`, and which of them are of position 0; `None` for
    a thing of another kind.
    """
    if isinstance(side, Activations):
        return _at(side, site, layer)
    if callable(getattr(side, "activations", None)):  # a report
        if layer is None and site not in WHOLE:
            raise ValueError(f"a report may hold several layers of {site}: say which, layer=12")
        return _of_report(side.activations(site=site if site in WHOLE else f"{site}.{layer}"))
    if hasattr(side, "parts"):  # what a report captured
        return _of_report(side)
    return _spoken(side, site, layer) if hasattr(side, "transcript") else None


def _spoken(conv: Any, site: str, layer: int | None) -> "tuple[torch.Tensor, list[bool]]":
    return _at(Activations([a for m in conv.transcript for a in m.activations or ()]), site, layer)


def _at(acts: Activations, site: str, layer: int | None) -> "tuple[torch.Tensor, list[bool]]":
    found = acts.query(site=site, layer=layer)
    if not found:
        raise ValueError(f"nothing was captured at {site}, layer {layer}: {acts!r}")
    if len(layers := sorted({a.layer for a in found})) > 1:
        raise ValueError(f"{site} was captured in the layers {layers}: say which, layer={layers[0]}")
    return _joined([(a.tensor, a.of_first()) for a in found])


def _of_report(rows: Any) -> "tuple[torch.Tensor, list[bool]]":
    frame = rows.frame()
    if len(places := sorted(set(zip(frame["site"], frame["layer"], strict=True)))) > 1:
        told = ", ".join(f"{site}.{layer}" for site, layer in places)
        raise ValueError(f"the rows are of {told}: take those of one, report.activations(site=…)")
    whole = zip(frame["position"], frame["reduce"], strict=True)
    return rows.tensor, [how not in ("mean", "last") and p == 0 for p, how in whole]


def _joined(parts: "Sequence[tuple[torch.Tensor, list[bool]]]") -> "tuple[torch.Tensor, list[bool]]":
    import torch

    return torch.cat([rows for rows, _ in parts]), [f for _, first in parts for f in first]


def _read(texts: Sequence[str], site: str, layer: int | None, participant: Any) -> "torch.Tensor":
    import torch

    if participant is None or (layer is None and site not in WHOLE):
        raise ValueError("texts need somebody who reads them and a layer: participant=, layer=")
    capture = Capture(site, layers=None if site in WHOLE else layer, reduce="mean")
    return torch.cat([f.activations.at() for f in participant.forward(list(texts), capture=capture)])


def _component(x: "torch.Tensor") -> "torch.Tensor":
    """The unit vector along which the rows differ most."""
    import torch

    _, _, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return v[0]


def _weights(x: "torch.Tensor", y: "torch.Tensor") -> "torch.Tensor":
    """The unit vector of a logistic regression, in the activations' own units."""
    import torch

    labels = [1] * len(x) + [0] * len(y)
    probe = Probe.fit(torch.cat([x, y]), labels)
    weights = probe.coef[0] / probe.scale
    return weights / weights.norm()
