"""From a capture in words to token positions, and from what was kept to the exact span."""

import random

import pytest
import torch

from interlens.chat.spans import Segment, Span
from interlens.chat.view import View
from interlens.errors import StoreError
from interlens.interp.capture import Activation, Activations, Capture
from interlens.interp.plan import cut, plan_of

LAYERS = 3


def segment(n, role, part, **rest):
    return Segment(text="", ids=tuple(range(n)), role=role, part=part, **rest)


VIEW = View(
    "bob",
    (),
    (
        segment(2, "system", "header"),
        segment(3, "system", "content"),
        segment(1, "system", "footer"),
        segment(2, "user", "header"),
        segment(4, "user", "content", speaker="alice", message=0, turn=0),
        segment(1, "user", "footer"),
        segment(2, "assistant", "header"),
        segment(
            5, "assistant", "content", speaker="bob", message=1, turn=1, generated=True, channel="answer"
        ),
        segment(1, "assistant", "footer"),
        segment(3, "user", "content", speaker="alice", message=2, turn=2),
        segment(2, "assistant", "header"),
    ),
)
TURN, N = 3, len(VIEW.ids)


def reply(n):
    rest = {"speaker": "bob", "turn": TURN, "generated": True, "channel": "answer"}
    return segment(n, "assistant", "content", **rest)


def expected(span, n_reply):
    """Positions of a span over this turn: all that was given is its prompt, the reply alone is generated."""
    given = [Segment(**{f: getattr(s, f) for f in s.__slots__} | {"generated": False}) for s in VIEW.segments]
    return (span or Span()).positions((*given, reply(n_reply)), "bob")


def kept(plan, n_reply):
    """What an engine keeps under a plan: each row of a tensor says its site, layer and position."""
    positions = [*plan.prompt, *(range(N, N + n_reply) if plan.generated else ())]
    out = {"positions": torch.tensor(positions, dtype=torch.int64)}
    for _, site, layer in plan.seen:
        out[f"{site}.{layer}"] = torch.tensor([[p, layer, site == "resid_pre"] for p in positions]).float()
    return out


def caught(captures, n_reply=4):
    plan = plan_of(captures, VIEW, LAYERS, TURN)
    return cut(captures, kept(plan, n_reply), VIEW, n_reply, TURN, LAYERS)


def some_span(chance):
    fields = {
        "turn": [None, None, 0, 1, -1, -2, slice(1, None), (0, 3)],
        "speaker": [None, None, "alice", "bob"],
        "role": [None, None, "user", "assistant"],
        "part": [None, None, "content", "header"],
        "phase": [None, None, "prompt", "generated"],
        "who": [None, None, "self", "others"],
        "channel": [None, None, None, "answer"],
        "first": [None, None, 1, 3],
        "last": [None, None, 1, 6],
    }
    span = Span(**{name: chance.choice(options) for name, options in fields.items()})
    for _ in range(chance.randrange(3)):
        other = Span(**{name: chance.choice(options) for name, options in fields.items()})
        span = chance.choice([lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a & ~b])(span, other)
    return span


def test_every_span_gets_exactly_its_positions():
    chance = random.Random(4)
    empty = 0
    for _ in range(600):
        span, n_reply = some_span(chance), chance.randrange(1, 7)
        wanted = expected(span, n_reply)
        if not wanted:
            empty += 1
            with pytest.raises(ValueError, match="matched no token of bob's turn 3"):
                caught([Capture(layers=1, span=span)], n_reply)
            continue
        [one], [receipt] = caught([Capture(layers=1, span=span)], n_reply)
        assert list(one.positions) == wanted == one.tensor[:, 0].tolist()
        assert receipt["positions"] == len(wanted)
    assert 0 < empty < 500, "both kinds were met"


def test_a_plan_keeps_no_more_than_it_must():
    words = Span(speaker="alice", part="content")
    plan = plan_of([Capture(layers=0, span=words)], VIEW, LAYERS, TURN)
    assert (plan.prompt, plan.generated) == ((8, 9, 10, 11, 21, 22, 23), False)
    plan = plan_of([Capture(layers=0, span=Span(phase="generated"))], VIEW, LAYERS, TURN)
    assert (plan.prompt, plan.generated) == ((), True)
    assert plan_of([], VIEW, LAYERS, TURN) is None


def test_sites_and_layers():
    items, receipts = caught([Capture(sites=("resid_pre", "resid_post"), layers=(-1, 0, 2))])
    found = [(a.site, a.layer) for a in items]
    assert found == [("resid_pre", 2), ("resid_pre", 0), ("resid_post", 2), ("resid_post", 0)]
    for a in items:
        assert a.tensor[0, 1:].tolist() == [a.layer, a.site == "resid_pre"]
        assert (a.participant, a.turn, a.n_layers) == ("bob", TURN, LAYERS)
    assert [(r["kind"], r["site"], r["layer"]) for r in receipts] == [("capture", *f) for f in found]
    assert len(caught([Capture()])[0]) == LAYERS
    assert [a.layer for a in caught([Capture("resid_post.-2")])[0]] == [1]
    with pytest.raises(ValueError, match=r"it has 3 layers \(0-2\)"):
        plan_of([Capture(layers=3)], VIEW, LAYERS, TURN)


def test_two_captures_in_one_plan_are_cut_apart():
    first = Capture(layers=0, span=Span(speaker="alice"))
    second = Capture(layers=(0, 1), span=Span(phase="generated"), reduce="last")
    items, _ = caught([first, second])
    assert [(a.layer, a.reduce, a.source) for a in items] == [
        (0, None, first),
        (0, "last", second),
        (1, "last", second),
    ]
    assert list(items[0].positions) == expected(first.span, 4)
    for a in items[1:]:
        assert (a.positions, a.tensor[:, 0].tolist()) == ((N + 3,), [N + 3])


def test_a_mean_leaves_position_0_out_and_says_so():
    items, receipts = caught([Capture(layers=(0, 1), reduce="mean", span=Span(role="system"))])
    for a in items:
        assert a.positions == (1, 2, 3, 4, 5)
        assert a.tensor.tolist() == [[3.0, a.layer, 0.0]]
    assert [r["positions"] for r in receipts] == [5, 5]
    [alone], _ = caught([Capture(layers=0, reduce="mean", span=Span(first=1))])
    assert alone.positions == (0,), "where there is nothing else it is what was asked for"


def test_a_mean_of_half_precision_is_taken_in_single():
    plan = plan_of([Capture(layers=0)], VIEW, LAYERS, TURN)
    raw = {"positions": torch.arange(N + 1), "resid_post.0": torch.full((N + 1, 2), 300.7).bfloat16()}
    [a], _ = cut([Capture(layers=0, reduce="mean")], raw, VIEW, 1, TURN, LAYERS)
    assert plan.generated
    assert a.tensor.dtype == torch.bfloat16
    assert torch.equal(a.tensor[0], raw["resid_post.0"][0])


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"sites": "attn_outs"}, ValueError, "there is no site"),
        ({"sites": ()}, ValueError, "needs a site"),
        ({"sites": "resid_post.1", "layers": 2}, ValueError, "leave one of them out"),
        ({"layers": "12"}, TypeError, "whole numbers"),
        ({"layers": (1.0,)}, TypeError, "whole numbers"),
        ({"layers": True}, TypeError, "whole numbers"),
        ({"layers": ()}, TypeError, "at least one"),
        ({"reduce": "max"}, ValueError, "reduce is"),
        ({"when": "during"}, ValueError, "when is"),
        ({"sites": "logits.3"}, ValueError, "belongs to the model"),
        ({"sites": ("logits", "final_norm"), "layers": 3}, ValueError, "leave layers= out"),
    ],
)
def test_captures_that_mean_nothing_are_refused_at_once(fields, error, said):
    with pytest.raises(error, match=said):
        Capture(**fields)


def test_a_capture_is_a_value():
    assert Capture(layers=[0, 1]) == Capture(layers=(0, 1))
    assert hash(Capture(layers=2)) == hash(Capture(layers=(2,)))
    assert Capture(layers=range(2)).layers == (0, 1)
    one, other = Capture(span=Span(first=1)), Capture(span=Span(first=2))
    assert one.describe() != other.describe()


# what came back


def activation(participant="bob", turn=0, layer=0, site="resid_post", n_layers=LAYERS, **rest):
    tensor = torch.randn(2, 4, generator=torch.Generator().manual_seed(turn * 10 + layer))
    fields = {"positions": (3, 7), "tensor": tensor} | rest
    return Activation(participant=participant, turn=turn, layer=layer, site=site, n_layers=n_layers, **fields)


@pytest.fixture
def acts():
    return Activations(
        [
            activation("alice", 0, 0),
            activation("bob", 1, 0),
            activation("bob", 1, 2),
            activation("alice", 2, 0),
            activation("bob", 3, 0),
            activation("bob", 3, 2, "resid_pre"),
        ]
    )


def places(found):
    return [(a.participant, a.turn, f"{a.site}.{a.layer}") for a in found]


def test_activations_are_found_by_any_of_their_addresses(acts):
    assert len(acts.query()) == len(acts) == 6
    assert places(acts.query(participant="alice")) == [
        ("alice", 0, "resid_post.0"),
        ("alice", 2, "resid_post.0"),
    ]
    assert places(acts.query(site="resid_pre")) == [("bob", 3, "resid_pre.2")]
    assert places(acts.query(site="resid_post.2")) == [("bob", 1, "resid_post.2")]
    assert places(acts.query(turn=-1, layer=0)) == [("bob", 3, "resid_post.0")]
    assert places(acts.query(participant="alice", turn=-1)) == [("alice", 2, "resid_post.0")]
    assert places(acts.query(participant="bob", turn=-2)) == [
        ("bob", 1, "resid_post.0"),
        ("bob", 1, "resid_post.2"),
    ]


def test_a_layer_from_the_end_is_counted_in_the_model_not_in_what_was_captured(acts):
    assert places(acts.query(layer=-1)) == [("bob", 1, "resid_post.2"), ("bob", 3, "resid_pre.2")]
    assert acts.query(layer=-2) == []
    assert len(acts.query(layer=-3)) == 4
    assert places(acts.query(site="resid_post.-1")) == [("bob", 1, "resid_post.2")]
    with pytest.raises(ValueError, match="depth is not known"):
        Activations([activation(n_layers=None)]).query(layer=-1)


@pytest.mark.parametrize(
    "wrong", [{"turn": -9}, {"turn": 8}, {"layer": -9}, {"layer": 7}, {"participant": "eve"}], ids=str
)
def test_an_address_that_is_not_there_matches_nothing(acts, wrong):
    assert acts.query(**wrong) == []
    with pytest.raises(LookupError, match="0 activations match"):
        acts.at(**wrong)


def test_at_wants_exactly_one(acts):
    assert torch.equal(acts.at(turn=1, layer=2), acts.items[2].tensor)
    with pytest.raises(LookupError, match=r"6 activations match.*resid_post\.2"):
        acts.at()
    with pytest.raises(ValueError, match="leave one of them out"):
        acts.query(site="resid_post.0", layer=0)


def test_activations_are_stored_and_read_back(tmp_path, acts):
    acts.extend(
        [
            activation(
                "a/b, 'ü' 你\n", 4, 1, reduce="mean", positions=(5,), tensor=torch.zeros(1, 4).bfloat16()
            ),
            activation("bob", 5, tensor=torch.arange(8.0).view(4, 2).t()),
            acts.items[0],
        ]
    )
    acts.save(tmp_path / "a.safetensors")
    read = Activations.load(tmp_path / "a.safetensors")
    assert len(read) == len(acts) == 9
    for a, b in zip(acts, read, strict=True):
        assert torch.equal(a.tensor, b.tensor)
        assert a.tensor.dtype == b.tensor.dtype
        for name in ("participant", "turn", "site", "layer", "positions", "reduce", "n_layers"):
            assert getattr(a, name) == getattr(b, name)
    Activations().save(tmp_path / "none.safetensors")
    assert len(Activations.load(tmp_path / "none.safetensors")) == 0


def test_another_file_is_not_read_as_activations(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(StoreError, match="holds no activations"):
        Activations.load(tmp_path / "x.safetensors")


def test_a_table_and_a_line(acts):
    frame = acts.frame()
    assert list(frame["participant"]) == [a.participant for a in acts]
    assert list(frame["positions"]) == [2] * 6
    assert frame["mean_norm"][0] == pytest.approx(float(acts.items[0].tensor.norm(dim=1).mean()))
    assert list(Activations().frame().columns) == list(frame.columns)
    sink = torch.tensor([[1000.0, 0], [3, 4], [0, 7]])
    kinds = [
        activation(positions=(0, 1, 2), tensor=sink),
        activation(positions=(0, 1, 2), tensor=sink[1:2], reduce="mean"),
        activation(positions=(0,), tensor=sink[:1]),
    ]
    assert list(Activations(kinds).frame()["mean_norm"]) == [6.0, 5.0, 1000.0], "without position 0"
    assert "6 tensors" in repr(acts)
    assert "<script" not in Activations([activation("<script>")])._repr_html_()
