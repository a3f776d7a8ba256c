"""Pictures: what is drawn is what was given, on given axes or new ones."""

from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pytest
import torch

from interlens.interp.capture import Activation, Activations
from interlens.notebook import plots


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def acts(positions: int = 5) -> Activations:
    made = []
    for layer in (3, 1):
        tensor = torch.full((positions, 4), float(layer))
        tensor[0] *= 1000
        place = {"participant": "ana", "turn": 0, "site": "resid_post", "layer": layer}
        made.append(Activation(**place, positions=tuple(range(positions)), tensor=tensor))
    return Activations(made)


def shown(ax: Any) -> Any:
    return ax.images[0].get_array()


def test_a_heat_map_has_layers_from_the_bottom_up_and_no_scale_by_position_0() -> None:
    ax = plots.heatmap(acts(), turn=0)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "3"]
    assert np.allclose(shown(ax)[:, 1], [2.0, 6.0])
    assert ax.images[0].get_clim() == (0.0, 6.0)
    along = plots.heatmap(acts(), turn=0, direction=torch.tensor([-2.0, 0, 0, 0]))
    assert np.allclose(shown(along)[:, 1], [-1.0, -3.0])
    assert along.images[0].get_clim() == (-3.0, 3.0)
    with pytest.raises(LookupError, match="nothing was captured"):
        plots.heatmap(acts(), site="q")
    assert len(plots.heatmap(acts(500), turn=0).get_xticks()) <= 30


def at(layer: int, positions: tuple[int, ...], tensor: Any, reduce: Any = None) -> Activation:
    place = {"participant": "ana", "turn": 0, "site": "resid_post", "layer": layer}
    return Activation(**place, positions=positions, tensor=torch.as_tensor(tensor), reduce=reduce)


def test_projections_keep_their_sign() -> None:
    made = Activations([at(n, (0, 1, 2), [[90.0], [-3.0], [2.0]], "projection") for n in (0, 1)])
    ax = plots.heatmap(made)
    assert shown(ax)[0].tolist() == [90.0, -3.0, 2.0]
    assert (ax.images[0].get_clim(), ax.images[0].get_cmap().name) == ((-3.0, 3.0), "RdBu_r")
    assert ax.figure.axes[-1].get_ylabel() == "h·u"
    with pytest.raises(ValueError, match="are projections already"):
        plots.heatmap(made, direction=torch.ones(4))
    with pytest.raises(ValueError, match="which have no length: draw them with heatmap"):
        plots.norms(made)
    mixed = Activations([*made, at(2, (0, 1, 2), torch.ones(3, 4))])
    with pytest.raises(ValueError, match="both as vectors and as projections"):
        plots.heatmap(mixed)


def test_a_heat_map_is_of_one_position_a_column() -> None:
    apart = Activations([at(0, (4, 5, 6), torch.ones(3, 4)), at(1, (7, 8, 9), torch.ones(3, 4))])
    with pytest.raises(ValueError, match=r"layer 0 at 3 \(4 to 6\) and layer 1 at 3 \(7 to 9\)"):
        plots.heatmap(apart)
    with pytest.raises(ValueError, match=r"the direction has 5 numbers, and resid_post\.1 has 4"):
        plots.heatmap(acts(), direction=torch.ones(5))
    means = Activations([at(n, (1, 2, 3), torch.ones(1, 4), "mean") for n in (0, 1)])
    for draw in (plots.heatmap, plots.norms):
        with pytest.raises(ValueError, match="a mean over positions has no number for each"):
            draw(means)
    lasts = Activations([at(n, (3,), torch.ones(1, 4), "last") for n in (0, 1)])
    assert shown(plots.heatmap(lasts)).shape == (2, 1)


def test_a_trace_has_a_line_for_each_reader() -> None:
    frame = pandas.DataFrame(
        {
            "message": [0, 1, 0, 1],
            "author": list("abab"),
            "reader": list("aabb"),
            "projection": [1, 2, 3, 4.0],
        }
    )
    ax = plots.trace(frame)
    assert [list(line.get_ydata()) for line in ax.lines[:2]] == [[1, 2], [3, 4]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0\na", "1\nb"]


def test_probes_by_layer_with_their_control() -> None:
    frame = pandas.DataFrame(
        {"layer": [0, 1], "accuracy": [0.5, 0.9], "sem": [0.1, 0.0], "shuffled": [0.5, 0.4]}
    )
    ax = plots.probes(frame)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["shuffled labels", "probe"]


def test_a_grid_is_centred_and_its_tokens_are_counted() -> None:
    frame = pandas.DataFrame([[0.0, 1.5], [-0.5, 0.2]], index=[4, 7], columns=[0, 1])
    ax = plots.grid(frame, tokens=["The", " cat\n"])
    assert ax.images[0].get_clim() == (-1.5, 1.5)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["The", "·cat⏎"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["4", "7"]
    with pytest.raises(ValueError, match="1 tokens were given for 2 positions"):
        plots.grid(frame, tokens=["x"])


def test_attention_has_queries_down() -> None:
    pattern = torch.zeros(2, 3, 4, 4)
    pattern[1, 2, 3, 0] = 1.0
    ax = plots.attention(pattern, layer=1, head=2, tokens=list("abcd"))
    assert shown(ax)[3, 0] == 1.0
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert [t.get_text() for t in ax.get_yticklabels()] == list("abcd")
    for wrong in ("abc", "abcde"):
        with pytest.raises(ValueError, match=f"{len(wrong)} tokens were given for 4 positions"):
            plots.attention(pattern, tokens=list(wrong))
    part = plots.attention(pattern[0, 0, 2:], tokens=list("abcd"))
    assert [t.get_text() for t in part.get_xticklabels()] == list("abcd")


def test_budget_and_dose() -> None:
    frame = pandas.DataFrame({"tokens": [20, 10], "success": [0.9, 0.5], "arm": ["solo"] * 2})
    frame["low"], frame["high"] = frame.success - 0.1, frame.success + 0.1
    assert list(plots.budget(frame).lines[0].get_xdata()) == [10, 20]
    rows = [
        (c, arm, c * (arm == "calm") + k) for c in (-1, 0, 1) for arm in ("calm", "random 0") for k in (0, 2)
    ]
    ax = plots.dose(pandas.DataFrame(rows, columns=["coef", "arm", "score"]))
    assert list(ax.lines[0].get_ydata()) == [0.0, 1.0, 2.0]
    assert ax.lines[3].get_color() == "0.6"


def test_axes_that_are_given_are_used() -> None:
    _, ax = plt.subplots()
    assert plots.heatmap(acts(), turn=0, ax=ax) is ax
