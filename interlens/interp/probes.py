"""Linear probes: fitted by scikit-learn, applied in torch, kept as safetensors and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import html
from interlens.interp import stored
from interlens.request import digest_of

if TYPE_CHECKING:
    import pandas
    import torch

_TENSORS = ("mean", "scale", "coef", "bias")


@dataclass(frozen=True, eq=False)
class Probe:
    """A logistic regression on standardised activations."""

    mean: "torch.Tensor"
    """`[d]`, subtracted first."""
    scale: "torch.Tensor"
    """`[d]`, divided by next."""
    coef: "torch.Tensor"
    """`[classes, d]`; one row for two classes."""
    bias: "torch.Tensor"
    classes: tuple[Any, ...]
    site: str = "resid_post"
    layer: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """The model, its template's digest, the span, the accuracy on held-out folds."""

    @classmethod
    def fit(
        cls,
        x: Any,
        y: Sequence[Any],
        *,
        site: str = "resid_post",
        layer: int | None = None,
        c: float = 0.05,
        folds: int = 0,
        seed: int = 0,
        participant: Any = None,
    ) -> "Probe":
        """Fit on activations `[n, d]` with labels `[n]`; `c` is the inverse strength of the L2 penalty.

        With `folds`, `facts["accuracy"]` is the mean over held-out folds. `participant=` notes whose
        activations they are: the model and a digest of its chat template.
        """
        import torch

        facts: dict[str, Any] = {}
        if participant is not None:
            template = digest_of(getattr(participant.template, "source", None))
            facts = {"model": participant.describe()["model"], "template": template}
        numbers, labels = _numbers(x), list(y)
        if len(numbers) != len(labels):
            raise ValueError(f"there are {len(numbers)} activations and {len(labels)} labels")
        if len(set(labels)) < 2:
            raise ValueError(f"a probe tells classes apart; all {len(labels)} labels are {labels[:1]}")
        model = _model(c, seed)
        if folds:
            facts["accuracy"] = float(_scores(numbers, labels, c, folds, seed).mean())
        with _alone():
            model.fit(numbers, labels)
        scaler, regression = model[0], model[1]
        parts = scaler.mean_, scaler.scale_, regression.coef_, regression.intercept_
        mean, scale, coef, bias = (torch.tensor(p, dtype=torch.float32) for p in parts)
        return cls(mean, scale, coef, bias, tuple(regression.classes_.tolist()), site, layer, facts)

    def logits(self, x: Any) -> "torch.Tensor":
        """`[…, classes]` scores, or `[…]` for two classes: above 0 is the second one."""
        import torch

        z = (torch.as_tensor(x).float() - self.mean) / self.scale
        out = z @ self.coef.T + self.bias
        return out[..., 0] if len(self.classes) == 2 else out

    def apply(self, x: Any) -> "torch.Tensor":
        """Probabilities: of the second class, `[…]`, or of every class, `[…, classes]`."""
        import torch

        out = self.logits(x)
        return torch.sigmoid(out) if len(self.classes) == 2 else torch.softmax(out, -1)

    def predict(self, x: Any) -> list[Any]:
        """The likeliest class of each row of `[n, d]`."""
        out = self.logits(x)
        places = (out > 0).long() if len(self.classes) == 2 else out.argmax(-1)
        return [self.classes[i] for i in places.reshape(-1).tolist()]

    def score(self, x: Any, y: Sequence[Any]) -> float:
        """Accuracy on other examples."""
        found = self.predict(x)
        return sum(a == b for a, b in zip(found, y, strict=True)) / len(found)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with the numbers and, in its header, everything else."""
        rest = {"classes": self.classes, "site": self.site, "layer": self.layer, "facts": self.facts}
        stored.write(path, "probe", {name: getattr(self, name) for name in _TENSORS}, rest)

    @classmethod
    def load(cls, path: str | Path) -> "Probe":
        """Read what `save` wrote."""
        tensors, rest = stored.read(path, "probe")
        mean, scale, coef, bias = (tensors[name] for name in _TENSORS)
        return cls(mean, scale, coef, bias, tuple(rest.pop("classes")), **rest)

    def _repr_html_(self) -> str:
        classes = " / ".join(map(str, self.classes))
        facts: list[Any] = [["classes", classes], ["width", self.coef.shape[-1]], *self.facts.items()]
        return html.tag("div", html.tag("b", repr(self)), html.table(facts, ["", ""]))

    def __repr__(self) -> str:
        where = self.site if self.layer is None else f"{self.site}.{self.layer}"
        told = f", accuracy {self.facts['accuracy']:.2f}" if "accuracy" in self.facts else ""
        return f"Probe({where}, {' / '.join(map(str, self.classes))}{told})"


def sweep(
    layers: Mapping[int, Any], y: Sequence[Any], *, c: float = 0.05, folds: int = 5, seed: int = 0
) -> "pandas.DataFrame":
    """A probe per layer on held-out folds: accuracy, its standard error, and accuracy with shuffled labels.

    `layers` maps a layer to activations `[n, d]`; the folds are the same for all.
    """
    import numpy as np
    import pandas

    shuffled = list(np.random.default_rng(seed).permutation(np.array(list(y), dtype=object)))
    rows = []
    for layer, x in layers.items():
        found, chance = (_scores(_numbers(x), labels, c, folds, seed) for labels in (list(y), shuffled))
        row = {"layer": layer, "accuracy": found.mean(), "sem": found.std(ddof=1) / len(found) ** 0.5}
        rows.append(row | {"shuffled": chance.mean()})
    return pandas.DataFrame(rows)


def _numbers(x: Any) -> Any:
    import torch

    tensor = torch.as_tensor(x).float()
    if tensor.dim() != 2 or not torch.isfinite(tensor).all():
        raise ValueError(f"a probe takes activations [n, d] of finite numbers; got {tuple(tensor.shape)}")
    return tensor.numpy()


def _model(c: float, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=2000, random_state=seed))


def _scores(x: Any, y: list[Any], c: float, folds: int, seed: int) -> Any:
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    with _alone():
        return cross_val_score(_model(c, seed), x, y, cv=split)


def _alone() -> Any:
    """One thread for a fit: such small ones take ten times as long on several that others keep busy."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)
