"""Pictures with matplotlib: functions take and return `Axes`, on a white background."""

from typing import TYPE_CHECKING, Any

from interlens.interp.capture import Activations

if TYPE_CHECKING:
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
    means = _stack([_mean(a.tensor, a.positions) for a in found])
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
    ax = ax if ax is not None else plt.subplots(layout="constrained")[1]
    for a in sorted(found, key=lambda a: a.layer):
        ax.plot(a.positions, a.tensor.float().norm(dim=-1).numpy(), label=f"{a.site}.{a.layer}")
    ax.set_yscale("log")
    ax.set_xlabel(f"token position in {found[0].participant}'s view, turn {found[0].turn}")
    ax.set_ylabel("norm")
    ax.legend()
    return ax  # type: ignore[no-any-return]


def _mean(tensor: "torch.Tensor", positions: tuple[int, ...]) -> "torch.Tensor":
    kept = (
        [i for i, p in enumerate(positions) if p > 0]
        if len(positions) == len(tensor)
        else list(range(len(tensor)))
    )
    return tensor[kept].float().mean(0)


def _stack(tensors: "list[torch.Tensor]") -> "torch.Tensor":
    import torch

    return torch.stack(tensors)
