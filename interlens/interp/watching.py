"""A probe that acts: it reads every token while a reply is sampled, and ends the reply when it is sure."""

import hashlib
import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from interlens.interp.capture import vector_of
from interlens.interp.probes import Probe
from interlens.interp.sites import FROM_ENGINE, absolute, parse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class StopWhen:
    """End a reply when a probe's score stays above, or below, a threshold for `patience` tokens in a row.

    A `Probe` of two classes scores log-odds of the second one; a direction scores h.u, u = v / |v|. The
    tokens scored are those of the reply; a token is scored when the next one would be drawn from it. Single
    scores have outliers, so that `patience` is 3 unless it is told otherwise.
    """

    probe: Any
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    layer: int | None = None
    """Taken from the probe where left out, as the site is."""
    site: str | None = None
    patience: int = 3

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError("give one threshold: above= or below=")
        if not math.isfinite(self.above if self.above is not None else self.below or 0.0):
            raise ValueError("the threshold must be a finite number")
        if self.patience < 1:
            raise ValueError(f"patience counts tokens, at least 1; got {self.patience}")
        for name, default in (("layer", None), ("site", "resid_post")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.probe, name, default))
        if self.layer is None:
            raise ValueError("a probe that stops a reply needs a layer: StopWhen(probe, layer=12, above=0)")
        [(site, _)] = parse(str(self.site), (self.layer,))
        if site in FROM_ENGINE:
            raise ValueError(f"{site} cannot be scored while a reply is sampled")
        self.weights()

    def weights(self) -> tuple["torch.Tensor", float]:
        """The score as a linear function: `[d]` and what is added."""
        if isinstance(self.probe, Probe):
            if len(self.probe.classes) != 2:
                raise ValueError(
                    f"a probe that stops a reply tells two classes apart; this has {self.probe.classes}"
                )
            weight = self.probe.coef[0] / self.probe.scale
            return weight, float(self.probe.bias[0] - weight @ self.probe.mean)
        vector = vector_of(self.probe)
        return vector / vector.norm(), 0.0

    def halt(self, n_layers: int) -> "Halt":
        """What one row carries."""
        weight, bias = self.weights()
        assert self.site is not None
        assert self.layer is not None
        layer = absolute(self.site, self.layer, n_layers)
        sign = 1.0 if self.above is not None else -1.0
        edge = self.above if self.above is not None else self.below
        return Halt(self.site, layer, weight, bias, sign, float(edge or 0.0), self.patience)

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash."""
        weight, bias = self.weights()
        named = hashlib.blake2b(weight.numpy().tobytes(), digest_size=8).hexdigest()
        names = ("above", "below", "site", "layer", "patience")
        return {"probe": [named, bias]} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Halt:
    """A `StopWhen` of one row."""

    site: str
    layer: int
    weight: "torch.Tensor"
    bias: float
    sign: float
    """1 for above, -1 for below."""
    edge: float
    patience: int

    def score(self, h_d: "torch.Tensor") -> float:
        """The score of one token."""
        return float((h_d.float() * self.weight.to(h_d.device)).sum()) + self.bias

    def ends(self, scores: list[float]) -> bool:
        """Whether the last ones are all beyond the edge."""
        last = scores[-self.patience :]
        return len(last) == self.patience and all(self.sign * (s - self.edge) > 0 for s in last)

    def digest(self) -> list[Any]:
        """For a log."""
        return [self.site, self.layer, self.weight, self.bias, self.sign, self.edge, self.patience]
