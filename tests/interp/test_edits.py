"""Edits in the batch: the numbers are those of raw torch hooks on the same ids, a row's own in any batch."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from interlens import Capture, Conversation, Direction
from interlens.chat.spans import At, Span
from interlens.engine import quick
from interlens.engine.batch import Engine
from interlens.engine.compiled import kernel
from interlens.engine.selftest import examine
from interlens.engine.slow import SlowEngine, engine_for
from interlens.engine.tiny import tiny_model, tiny_tokenizer
from interlens.interp.edits import Ablate, Change, Patch, RowEdit, Steer, Where
from interlens.interp.plan import Reduced, RowPlan
from interlens.interp.sites import Sites
from interlens.pretrained import AutoModelParticipant
from tests.engine.driving import GREEDY, drive, packed_tiny, prompt, row
from tests.engine.zoo import FAMILIES

D = 64
V = torch.randn(D, generator=torch.Generator().manual_seed(1)) * 3
U = V / V.norm()
IDS = prompt(40, 3)


@pytest.fixture(scope="module")
def model():
    return packed_tiny()


def change(kind, coef=1.0, **more):
    return Change(kind, None if kind == "zero" else V, coef, **more)


def edit(kind="add", coef=1.0, site="resid_post", layer=0, where=None, **more):
    where = where or Where(prompt=frozenset([len(IDS) - 1]), reply=True, ended=True)
    return RowEdit(site=site, layer=layer, change=change(kind, coef, **more), where=where, source="test")


def by_hand(kind, coef, h):
    """The formulas of the documentation, one position after the other, in double precision."""
    h, v = h.double(), V.double()
    u, along = v / v.norm(), (h @ (v / v.norm()))[:, None]
    if kind == "add":
        return h + coef * v
    if kind == "ablate":
        return h - along * u
    if kind == "clamp":
        return h + (coef - along) * u
    if kind == "cap":
        return torch.where(along > coef, h + (coef - along) * u, h)
    return torch.zeros_like(h)


@pytest.mark.parametrize("kind", ["add", "ablate", "clamp", "cap", "zero"])
@pytest.mark.parametrize("coef", [0.0, -1.5, 2.0])
@pytest.mark.parametrize("keep_norm", [False, True])
def test_the_arithmetic_is_the_documentation_s(kind, coef, keep_norm):
    h = torch.randn(9, D, generator=torch.Generator().manual_seed(5)) * 4
    wanted = by_hand(kind, coef, h)
    if keep_norm and kind != "zero":
        wanted = wanted * h.double().norm(dim=-1, keepdim=True) / wanted.norm(dim=-1, keepdim=True)
    assert torch.allclose(change(kind, coef, keep_norm=keep_norm).apply(h).double(), wanted, atol=1e-5)


def test_heads_and_neurons_are_changed_alone():
    h = torch.randn(5, D, generator=torch.Generator().manual_seed(5))
    own = torch.randn(16, generator=torch.Generator().manual_seed(6))
    columns = tuple(range(16, 32)) + tuple(range(48, 64))
    out = Change("ablate", own, columns=columns).apply(h)
    assert torch.equal(out[:, :16], h[:, :16])
    assert torch.equal(out[:, 32:48], h[:, 32:48])
    for part in (slice(16, 32), slice(48, 64)):
        assert (out[:, part] @ own).abs().max() < 1e-4
    assert torch.equal(Change("zero", columns=(3, 5)).apply(h)[:, [3, 5]], torch.zeros(5, 2))
    assert torch.allclose(Change("clamp", torch.ones(1), 2.5, columns=(7,)).apply(h)[:, 7], torch.tensor(2.5))


@contextlib.contextmanager
def by_layer(layer, changed):
    """A Llama layer written out, with its stream changed between attention and MLP."""

    def forward(hidden_states, **kwargs):
        out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        middle = changed(hidden_states + out)
        return middle + layer.mlp(layer.post_attention_layernorm(middle))

    before = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        layer.__dict__.pop("forward")
        if before is not None:
            layer.forward = before


def hooked_logits(model, ids, place, positions, fn):
    """A plain forward pass with one raw hook that changes some positions."""

    def changed(hidden):
        out = hidden.clone()
        out[0, positions] = fn(hidden[0, positions]).to(hidden.dtype)
        return out

    tap = Sites(model).tap(*place)
    if place[0] == "resid_mid":
        with by_layer(model.model.layers[place[1]], changed), torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]
    if tap.side == "in":
        hook = tap.module.register_forward_pre_hook(lambda m, args: (changed(args[0]), *args[1:]))
    else:

        def after(_, __, out):
            return (changed(out[0]), *out[1:]) if isinstance(out, tuple) else changed(out)

        hook = tap.module.register_forward_hook(after)
    with hook, torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


PLACES = [
    ("resid_pre", 1),
    ("resid_post", 0),
    ("resid_mid", 0),
    ("attn_out", 1),
    ("mlp_out", 0),
    ("z", 0),
    ("embeddings", 0),
    ("final_norm", 0),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", ["add", "ablate", "clamp"])
def test_generation_under_an_edit_is_that_of_raw_hooks(model, kind, place):
    plan = RowPlan(edits=(edit(kind, 2.0, *place),))
    [result] = drive(Engine(model, prefill_budget=17), [row(IDS, 6, sampling=GREEDY, plan=plan)])
    ids = (*IDS, *result.ids[:-1])
    positions = list(range(len(IDS) - 1, len(ids)))
    wanted = hooked_logits(model, ids, place, positions, lambda h: by_hand(kind, 2.0, h))
    plain = model(torch.tensor([ids])).logits[0]
    own = result.logits
    assert torch.allclose(own, wanted[len(IDS) - 1 :], atol=1e-4, rtol=1e-4)
    assert (plain[len(IDS) - 1 :] - own).abs().max() > 1e-2, "the edit changes something"
    assert int(wanted[len(IDS) - 1].argmax()) == result.ids[0], "the first token is reached"
    assert torch.allclose(wanted[: len(IDS) - 1], plain[: len(IDS) - 1], atol=1e-4)


def test_edits_of_one_site_act_in_their_order(model):
    pairs = ((edit("add", 1.0), edit("ablate")), (edit("ablate"), edit("add", 1.0)))
    kept = [
        drive(
            Engine(model), [row(IDS, 0, plan=RowPlan(captures=(("resid_post", 0),), prompt=(39,), edits=e))]
        )[0]
        for e in pairs
    ]
    ends = [k.done.captures["resid_post.0"][0] for k in kept]
    assert abs(float(ends[0] @ U)) < 1e-3
    assert abs(float(ends[1] @ U) - float(V.norm())) < 1e-3


def test_a_capture_reads_before_and_after_the_edits(model):
    plan = RowPlan(
        captures=(("resid_post", 0), ("resid_pre", 1)),
        before=(("resid_post", 0),),
        prompt=tuple(range(40)),
        generated=True,
        edits=(edit("add", 2.0),),
    )
    [result] = drive(Engine(model, prefill_budget=13), [row(IDS, 5, sampling=GREEDY, plan=plan)])
    got = result.done.captures
    moved = got["resid_post.0"] - got["before:resid_post.0"]
    assert torch.equal(moved[:39], torch.zeros(39, D))
    assert torch.allclose(moved[39:], (2 * V).expand(6, D), atol=1e-4)
    assert torch.equal(got["resid_post.0"], got["resid_pre.1"]), "what comes next reads the edited stream"
    [receipt] = result.done.receipts
    assert (receipt["positions"], receipt["run"]) == (6, 6)
    assert receipt["moved"] == pytest.approx(2 * float(V.norm()), rel=1e-4)


def everybody():
    """Rows with other edits, sites, layers, captures, caps and temperatures."""
    kinds = itertools.cycle([("add", 2.0), ("ablate", 0.0), ("clamp", 1.5), ("cap", 0.5), None])
    places = itertools.cycle(
        [("resid_post", 0), ("mlp_out", 1), ("z", 0), ("resid_mid", 1), ("resid_pre", 0)]
    )
    rows = []
    for i, kind in zip(range(13), kinds, strict=False):
        n = 5 + 7 * i % 40
        where = Where(prompt=frozenset({0, n - 1, n // 2}), reply=i % 3 != 0, ended=False)
        site, layer = next(places)
        edits = (
            ()
            if kind is None
            else (edit(*kind, site, layer, where), edit("add", 0.3, "resid_post", 1, where))
        )
        plan = RowPlan(
            captures=(("resid_post", 1), ("attn_out", 0)), prompt=(0, n - 1), generated=True, edits=edits
        )
        rows.append(row(prompt(n, 50 + i), 3 + i % 5, seed=i, plan=plan))
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_other_edits_do_not_see_each_other(dtype):
    model = packed_tiny(dtype=dtype)
    rows = everybody()
    alone = [drive(Engine(model, max_rows=1), [r])[0] for r in rows]
    for options in ({"max_rows": 16}, {"max_rows": 3, "prefill_budget": 7}, {"max_rows": 5, "kv_bytes": 0}):
        together = drive(Engine(model, **options), rows)
        for a, b in zip(alone, together, strict=True):
            assert a.same_bits(b)
            assert a.done.captures.keys() == b.done.captures.keys()
            assert all(torch.equal(a.done.captures[k], b.done.captures[k]) for k in a.done.captures)
            assert [r["positions"] for r in a.done.receipts] == [r["positions"] for r in b.done.receipts]


@pytest.mark.skipif(kernel() is None, reason="compares the kernel's whole layers with modules")
def test_an_edit_that_changes_nothing_changes_no_bit(model):
    """Its hooks send the layer through its modules: the same bits as in one call."""
    [plain] = drive(Engine(model), [row(IDS, 6)])
    nothing = RowPlan(edits=(edit("add", 0.0, "mlp_out", 0), edit("add", 0.0, "z", 1)))
    [same] = drive(Engine(model), [row(IDS, 6, plan=nothing)])
    assert same.same_bits(plain)


def test_keys_are_shared_by_rows_that_agree_in_ids_and_edits_alone(model):
    engine = Engine(model)
    where = Where(prompt=frozenset({20}))
    plain, plus, more = (
        None,
        RowPlan(edits=(edit("add", 2.0, where=where),)),
        RowPlan(edits=(edit("add", 3.0, where=where),)),
    )
    reused = {}
    for name, plan in (
        ("plain", plain),
        ("plus", plus),
        ("plus again", plus),
        ("more", more),
        ("plain again", plain),
    ):
        [result] = drive(engine, [row((*IDS, 7), 2, sampling=GREEDY, plan=plan)])
        [fresh] = drive(Engine(model), [row((*IDS, 7), 2, sampling=GREEDY, plan=plan)])
        assert result.same_bits(fresh)
        reused[name] = result.done.reused_tokens
    assert reused == {"plain": 0, "plus": 20, "plus again": 40, "more": 20, "plain again": 40}


def test_the_stream_in_the_middle_is_edited_for_the_mlp_and_for_what_comes_after(model):
    """Not only what the MLP reads: the sum that the layer gives holds with the edited stream."""
    sites = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    for kind in ("add", "ablate", "clamp"):
        plan = RowPlan(
            captures=tuple((s, 0) for s in sites),
            before=(("resid_mid", 0),),
            prompt=tuple(range(40)),
            edits=(edit(kind, 2.0, "resid_mid", 0, Where(prompt=frozenset({7, 39}))),),
        )
        [result] = drive(Engine(model, prefill_budget=13), [row(IDS, 0, plan=plan)])
        got = {s: result.done.captures[f"{s}.0"] for s in sites}
        early = result.done.captures["before:resid_mid.0"]
        assert torch.allclose(got["resid_pre"] + got["attn_out"], early, atol=1e-5)
        assert torch.allclose(
            got["resid_mid"][[7, 39]], by_hand(kind, 2.0, early[[7, 39]]).float(), atol=1e-4
        )
        assert torch.allclose(got["resid_mid"] + got["mlp_out"], got["resid_post"], atol=1e-4)


def test_patches_of_other_columns_or_widths_are_other_patches():
    """What keys are shared by names the numbers, where they are put, and nothing else."""
    values = torch.ones(2, 16)
    marks = {
        (Change("set", values, columns=tuple(range(a, a + 16))).at(0), a)
        for a in (0, 16, 32, 48)
        for _ in range(2)
    }
    assert len(marks) == len({m for m, _ in marks}) == 4
    for n in range(300):  # a mark of one byte would meet another of these
        marks.add((Change("set", values, columns=tuple(range(n, n + 16))).at(0), n))
    assert len({m for m, _ in marks}) == 300
    whole = Change("set", torch.stack([values[0], values[0] * 2]))
    assert whole.at(0) == Change("set", values[:1]).at(0), "other positions of the patch do not show"
    assert Change("set", torch.ones(1, 4)).digest != Change("set", torch.ones(2, 2)).digest


def test_one_edit_on_two_models_of_other_widths_is_checked_on_both():
    """A width that goes into the other's evenly must not be taken for heads."""
    small = AutoModelParticipant.from_pretrained("tiny", name="alice")
    other = AutoModelParticipant.from_model(FAMILIES["gpt2"].make(), tiny_tokenizer(), name="bob")
    push = Steer(torch.ones(128), layers=0, site="mlp_act")
    assert small.forward(IDS, edits=push, logits="last").logits.shape == (1, 259)
    with pytest.raises(ValueError, match=r"128 numbers, and mlp_act.0 of this model has 256"):
        other.forward(tuple(i % 250 for i in IDS), edits=push)
    with pytest.raises(ValueError, match="64 numbers to edit, and the edit brings 32"):
        Change("add", torch.ones(32)).check(64, "here")
    Change("add", torch.ones(16), columns=tuple(range(32))).check(
        64, "heads share a direction of their width"
    )
    with pytest.raises(ValueError, match="32 numbers to edit, and the edit brings 16"):
        Change("set", torch.ones(1, 16), columns=tuple(range(32))).check(64, "here")


def test_neurons_of_a_direction_of_the_whole_site():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    capture = Capture("mlp_act", layers=0)
    plain = alice.forward(IDS, capture=capture).activations.at()
    own = torch.arange(128).float()
    for direction in (own, own[[3, 100]]):
        push = Steer(direction, layers=0, site="mlp_act", neurons=(3, 100), span=Span())
        moved = alice.forward(IDS, edits=push, capture=capture).activations.at() - plain
        assert torch.allclose(moved[:, [3, 100]], torch.tensor([3.0, 100.0]).expand(40, 2), atol=1e-4)
        assert moved.abs().sum(0).count_nonzero() == 2


# -- in a conversation


def talk(**options):
    people = [
        AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=6) for n in ("alice", "bob")
    ]
    return Conversation(people, shared_context="Say something about the sea.", **options)


def forced(conv, message, edits):
    """Logits of a plain pass over what a message's model saw and said, with raw hooks at resid_post.0."""
    model = conv.participant(message.author).model
    ids = (*message.prompt_ids, *message.token_ids[:-1])

    def changed(_, __, out):
        new = out.clone()
        for positions, by in edits:
            at = [p for p in positions if p < len(ids)]
            new[0, at] = new[0, at] + by
        return new

    with Sites(model).tap("resid_post", 0).module.register_forward_hook(changed), torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, len(message.prompt_ids) - 1 :]


def logp(logits, ids):
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("history", ["lived", "clean"])
@pytest.mark.parametrize("reuse", ["auto", False])
def test_an_edited_past_stays_in_memory_or_does_not(history, reuse):
    people = [
        AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=6, kv_reuse=reuse)
        for n in ("alice", "bob")
    ]
    conv = Conversation(people, shared_context="Say something about the sea.")
    conv = conv.hook(Steer(V, layers=0, coef=2.0, history=history), speaker="alice", turns=0)
    first = conv.step("alice", logprobs=True)
    conv.step("bob")
    third = conv.step("alice", logprobs=True)
    began, size = len(first.prompt_ids) - 1, len(first.prompt_ids) + len(first.token_ids)
    touched = range(began, size)
    assert torch.allclose(
        logp(forced(conv, first, [(touched, 2 * V)]), first.token_ids),
        torch.tensor(first.metadata["logprobs"]),
        atol=1e-4,
    )
    remembered = [(touched, 2 * V)] if history == "lived" else []
    wanted = logp(forced(conv, third, remembered), third.token_ids)
    assert third.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert torch.allclose(wanted, torch.tensor(third.metadata["logprobs"]), atol=1e-4)
    other = logp(forced(conv, third, [] if remembered else [(touched, 2 * V)]), third.token_ids)
    assert (wanted - other).abs().max() > 1e-3, "the two memories differ"


def test_memory_keeps_order_and_number_of_edits():
    """Twice the same hook is twice the push, also in memory; edits in another order keep that order."""
    push, out = Steer(V, layers=0, coef=1.0), Ablate(V, layers=0, span=Span(phase="generated"))

    def told(first, second):
        conv = talk().hook(*first, speaker="alice", turns=0).hook(*second, speaker="alice", turns=2)
        conv.run(3)
        return conv, conv.step("alice", logprobs=True)

    def spelt(conv, message, one, two):
        """Every position's changes, in order, by hand."""
        a, b = (m for m in conv.transcript if m.author == "alice" and m is not message)
        ids, touched = (*message.prompt_ids, *message.token_ids), {}
        for m, hooks in ((a, one), (b, two)):
            began, end = len(m.prompt_ids), len(m.prompt_ids) + len(m.token_ids)
            for p in range(began - 1, end):
                touched[p] = [h for h in hooks if h is push or p >= began]
        model = conv.participant("alice").model

        def changed(_, __, hidden):
            new = hidden.clone()
            for p, hooks in touched.items():
                for h in hooks if p < hidden.shape[1] else ():
                    new[0, p] = new[0, p] + V if h is push else new[0, p] - (new[0, p] @ U) * U
            return new

        with Sites(model).tap("resid_post", 0).module.register_forward_hook(changed), torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, len(message.prompt_ids) - 1 :]
        return logp(logits, message.token_ids)

    for one, two in (((push, push), (push,)), ((push, out), (out, push)), ((out, push), (out, push))):
        conv, message = told(one, two)
        got = torch.tensor(message.metadata["logprobs"])
        assert torch.allclose(spelt(conv, message, one, two), got, atol=1e-4), (one, two)


def test_a_listener_s_reading_is_edited_and_the_speaker_s_own_is_not():
    conv = talk().hook(
        Steer(V, layers=0, coef=2.0, span=Span(speaker="alice", part="content")), speaker="bob"
    )
    first = conv.step("alice")
    assert "receipts" not in first.metadata
    heard = conv.step("bob", logprobs=True)
    positions = conv.rewind(to=first).view("bob").positions(Span(speaker="alice", part="content"))
    assert positions
    [receipt] = heard.metadata["receipts"]
    assert receipt["positions"] == len(positions)
    wanted = logp(forced(conv, heard, [(positions, 2 * V)]), heard.token_ids)
    assert torch.allclose(wanted, torch.tensor(heard.metadata["logprobs"]), atol=1e-4)


def test_a_coefficient_may_follow_the_turn():
    conv = talk().hook(Steer(V, layers=0, coef=lambda turn: 1.0 + turn, history="clean"))
    conv.run(turns=3)
    moved = [m.metadata["receipts"][0]["moved"] for m in conv.transcript if m.metadata.get("receipts")]
    assert moved == pytest.approx([(1 + t) * float(V.norm()) for t in range(3)], rel=1e-3)


@pytest.mark.parametrize("position", [0, 3, -1, -2])
def test_a_patch_touches_exactly_its_position(position):
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    new = torch.full((D,), 0.5)
    patch = Patch(new, layers=0, span=position)
    run = alice.forward(IDS, capture=Capture("resid_post", layers=0), edits=patch)
    plain = alice.forward(IDS, capture=Capture("resid_post", layers=0))
    changed = (run.activations.at() != plain.activations.at()).any(-1).nonzero()[:, 0].tolist()
    assert changed == [position % len(IDS)]
    assert torch.equal(run.activations.at()[position % len(IDS)], new)


def test_edits_of_several_prompts_are_made_once_each():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    prompts = [IDS, IDS[:7], IDS[:20]]
    push, more = Steer(V, layers=0, coef=1.0), Steer(V, layers=1, coef=2.0)
    for given, own in (
        (push, [(push,)] * 3),
        ([push, more], [(push, more)] * 3),
        ([[push], [], [more, push]], [(push,), (), (more, push)]),
        (None, [()] * 3),
    ):
        runs = alice.forward(prompts, edits=given, logits="last")
        for ids, run, edits in zip(prompts, runs, own, strict=True):
            alone = alice.forward(ids, edits=list(edits), logits="last")
            assert torch.equal(run.logits, alone.logits)
    one = alice.forward(IDS, edits=push, capture=Capture("resid_post", layers=0)).activations.at()
    plain = alice.forward(IDS, capture=Capture("resid_post", layers=0)).activations.at()
    assert torch.allclose(one[-1] - plain[-1], V, atol=1e-4), "once"
    with pytest.raises(ValueError, match="3 prompts, 2 lists of edits"):
        alice.forward(prompts, edits=[[push], [more]])


def test_a_patch_from_a_branch_gives_back_what_it_was_taken_from():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    a, b = prompt(20, 1), prompt(20, 2)
    good = alice.forward(a, capture=Capture("resid_post", layers=1), logits=True)
    span = At(tuple(range(20)))
    patched = alice.forward(b, edits=Patch(good.activations, layers=1, span=span), logits=True)
    assert torch.allclose(patched.logits, good.logits, atol=1e-5)
    assert not torch.allclose(alice.forward(b, logits=True).logits, good.logits, atol=1e-2)


def test_what_cannot_be_done_is_said():
    conv = talk()
    nan, inf, wide = torch.full((D,), math.nan), torch.full((D,), math.inf), torch.ones(D + 1)
    cases = [
        (lambda: Steer(nan, layers=0), "NaN or infinite"),
        (lambda: Steer(inf, layers=0), "NaN or infinite"),
        (lambda: Steer(torch.zeros(D), layers=0), "change nothing"),
        (lambda: Steer(V), "needs layers"),
        (lambda: Steer(V, layers=0, mode="push"), "mode is one of"),
        (lambda: Steer(V, layers=0, coef=math.nan), "finite"),
        (lambda: Steer(V, layers=0, site="resid_pots"), "resid_post"),
        (lambda: Steer(V, layers=0, site="attn_pattern"), "captured and not edited"),
        (lambda: Steer(V, layers=0, heads=[1]), "heads goes with"),
        (lambda: Steer(V, layers=0, history="old"), "lived"),
        (lambda: conv.step("alice", steer=Steer(V, layers=2)), "it has 2 layers"),
        (lambda: conv.step("alice", steer=Steer(wide, layers=0)), "65 numbers"),
        (lambda: conv.step("alice", steer=Steer(V, layers=(1, -1))), "layer 1 twice"),
        (
            lambda: conv.step("alice", steer=Steer(V, layers=0, span=Span(speaker="carol"))),
            "matches no token",
        ),
        (lambda: conv.step("alice", steer=Steer(V, layers=0, span=Span(last=2))), "not there yet"),
        (
            lambda: conv.step("alice", steer=Steer(V, layers=0, span=Span(channel="answer"))),
            "reasoning from answer",
        ),
        (lambda: conv.step("alice", steer=Steer(V, layers=0, span=1000)), "not in this prompt"),
        (lambda: conv.step("alice", patch=Patch(V, layers=0, span=Span(phase="generated"))), "not there yet"),
        (lambda: conv.step("alice", patch=Patch(torch.ones(3, D), layers=0, span=[0, 1])), "selects 2"),
        (lambda: conv.step("alice", steer=Steer(V, layers=0, site="z", heads=[9])), "head 9"),
        (lambda: conv.step("alice", steer=V), "an edit is Steer"),
        (lambda: conv.hook(3), "hook takes"),
    ]
    for make, said in cases:
        with pytest.raises((ValueError, TypeError), match=said):
            make()
    assert len(conv.transcript) == 1, "nothing was said"


def test_a_bad_row_ends_alone(model):
    good = row(IDS, 4, plan=RowPlan(edits=(edit("add", 1.0),)))
    bad = row(
        prompt(11, 4), 4, plan=RowPlan(edits=(edit("add", math.inf, where=Where(prompt=frozenset({3}))),))
    )
    [alone] = drive(Engine(model), [good])
    found = drive(Engine(model), [good, bad, row(prompt(9, 9), 3)], failing=True)
    assert found[0].same_bits(alone)
    assert found[1].done.finish == "error"
    assert found[2].done.error is None


def test_sampling_and_branches_are_edited_too():
    conv = talk().hook(Steer(V, layers=0, coef=3.0), speaker="alice")
    [message] = conv.sample("alice", n=1, max_new_tokens=1)
    assert message.metadata["receipts"][0]["positions"] == 1, "the last prompt position; one token is not run"
    conv.step("alice")
    branch = conv.branch(reseed=1)
    one, two = conv.step("alice", temperature=0), branch.step("alice", temperature=0)
    assert one.token_ids == two.token_ids
    assert one == two


def test_a_denied_turn_leaves_no_edited_memory():
    from interlens.hooks import deny

    class Once:
        done = False

        def review(self, message, conversation):
            if not self.done:
                self.done = True
                return deny()
            return None

    conv = talk(message_hooks=(Once(),)).hook(Steer(V, layers=0, coef=3.0), speaker="alice", turns=0)
    assert conv.step("alice") is None
    plain = conv.step("bob", temperature=0)
    assert "receipts" not in plain.metadata


# -- reductions on the way


def test_a_reduction_on_the_way_is_that_of_everything_and_the_row_s_own(model):
    """A mean's blocks are cut by the number of positions alone, so prefill pieces and mates do not show."""
    everything = Where(prompt=frozenset(range(1, 150)), reply=True)
    kinds = (("after", "resid_post", 1), ("before", "resid_post", 0))
    plans, rows = [], []
    for i, n in enumerate((150, 70, 64, 9)):
        where = Where(prompt=frozenset(p for p in everything.prompt if p < n), reply=True, ended=False)
        less = tuple(
            Reduced(k, kinds, how, where, V if how == "projection" else None)
            for k, how in enumerate(("mean", "last", "projection"))
        )
        whole = {"captures": (("resid_post", 1),), "before": (("resid_post", 0),)}
        seen = {"prompt": tuple(range(n)), "generated": True, "edits": (edit("add", 2.0, where=where),)}
        plans.append((RowPlan(reduced=less, **seen), RowPlan(**whole, **seen)))
        rows.append(row(prompt(n, 70 + i), 5, seed=i, plan=plans[-1][0]))
    alone = [drive(Engine(model, max_rows=1), [r])[0].done.captures for r in rows]
    for options in ({}, {"prefill_budget": 7, "max_rows": 3}, {"prefill_budget": 31}):
        for a, b in zip(alone, drive(Engine(model, **options), rows), strict=True):
            assert a.keys() == b.done.captures.keys()
            assert all(torch.equal(a[k], b.done.captures[k]) for k in a)
    for r, a, (_, whole) in zip(rows, alone, plans, strict=True):
        [result] = drive(Engine(model), [dataclasses.replace(r, plan=whole)])
        full = result.done.captures
        assert not [name for name in a if name in ("resid_post.1", "before:resid_post.0")], (
            "nothing else is kept"
        )
        for name in ("resid_post.1", "before:resid_post.0"):
            assert torch.allclose(a[f"0:{name}"][0], full[name][1:].double().mean(0).float(), atol=1e-6)
            assert torch.equal(a[f"1:{name}"][0], full[name][-1])
            assert torch.allclose(a[f"2:{name}"][:, 0], full[name] @ U, atol=1e-3)


def ending(n):
    """A talk whose replies end by themselves after n tokens."""
    [alice] = [
        AutoModelParticipant.from_pretrained(
            "tiny", name="alice", max_new_tokens=12, seed=s, logit_bias={2: b}
        )
        for s, b in [ENDINGS[n]]
    ]
    return Conversation(alice, shared_context="Say something about the sea.")


def endings():
    found = {}
    for s in range(40):
        alice = AutoModelParticipant.from_pretrained(
            "tiny", name="alice", max_new_tokens=12, seed=s, logit_bias={2: 6.0}
        )
        m = Conversation(alice, shared_context="Say something about the sea.").step("alice")
        if m.metadata["finish"] == "eos":
            found.setdefault(len(m.token_ids), (s, 6.0))
        if {1, 2, 3} <= found.keys():
            break
    return found


ENDINGS = {}


@pytest.mark.parametrize(
    "span", [Span(phase="generated", first=3), At((0,)) | Span(phase="generated")], ids=str
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_positions_of_a_mean_are_those_that_entered_it(n, span):
    """Also where a reply ends before the span does, and where position 0 takes part only without a reply."""
    if not ENDINGS:
        ENDINGS.update(endings())
    both = [Capture("resid_post", layers=1, span=span, reduce=how) for how in ("mean", None)]
    mean, whole = ending(n).step("alice", capture=both).activations
    kept = [i for i, p in enumerate(whole.positions) if p > 0]
    assert mean.positions == tuple(whole.positions[i] for i in kept)
    assert torch.allclose(mean.tensor[0], whole.tensor[kept].mean(0), atol=1e-5)


def test_an_edit_of_the_first_tokens_reaches_an_end_token_among_them():
    if not ENDINGS:
        ENDINGS.update(endings())
    span = Span(phase="generated", first=3)
    acts = [
        Capture("resid_post", layers=0, span=Span(phase="generated"), when=w) for w in ("before", "after")
    ]
    for n in (1, 2, 3):
        conv = ending(n)
        message = conv.step("alice", capture=acts, steer=Steer(V * 0.01, layers=0, span=span))
        early, late = message.activations
        assert (late.tensor != early.tensor).any(-1).tolist() == [True] * min(3, len(message.token_ids))


def test_words_of_a_reply_are_found_once_it_is_there():
    conv = talk()
    free = conv.branch().step("alice")
    tokenizer = conv.participant("alice").tokenizer
    text = tokenizer.decode(free.token_ids[2:3])
    span = Span(text=text, phase="generated")
    whole = Capture("resid_post", layers=1, span=Span(phase="generated"))
    found = [Capture("resid_post", layers=1, span=span, reduce=how) for how in (None, "mean")]
    everything, words, mean = conv.branch().step("alice", capture=[whole, *found]).activations
    assert len(free.prompt_ids) + 2 in words.positions
    places = [everything.positions.index(p) for p in words.positions]
    assert torch.equal(words.tensor, everything.tensor[places])
    assert torch.allclose(mean.tensor[0], words.tensor.mean(0), atol=1e-5)
    with pytest.raises(ValueError, match="words of a reply that is not there yet"):
        conv.step("alice", steer=Steer(V, layers=0, span=~Span(text="sea")))


def test_a_projection_of_another_width_ends_its_own_row():
    conv = talk()
    with pytest.raises(ValueError, match=r"a projection reads 65 numbers, and resid_post\.1 has 64"):
        conv.step("alice", capture=Capture("resid_post", layers=1, reduce=torch.ones(D + 1)))


def test_captures_can_be_compared_and_nested():
    one, two = (Capture("resid_post", layers=1, reduce=V * s) for s in (1, 2))
    assert one != two
    assert one == Capture("resid_post", layers=1, reduce=V.clone())
    conv = talk()
    with conv.capture(one) as a:
        with conv.capture(two) as b:
            conv.step("alice")
        conv.step("bob")
    assert (len(a), len(b)) == (2, 1)


def test_a_mean_of_a_turn_is_the_mean_of_its_positions():
    span = Span(phase="generated", part="content") | Span(speaker="bob")
    both = [Capture("resid_post", layers=1, span=span, reduce=how) for how in ("mean", None, "last")]
    conv = talk()
    conv.run(2)
    mean, whole, last = conv.step("alice", capture=both).activations
    assert mean.positions == whole.positions
    assert mean.tensor.shape == (1, D)
    assert torch.allclose(mean.tensor[0], whole.tensor.mean(0), atol=1e-5)
    assert torch.equal(last.tensor[0], whole.tensor[-1])
    counted = conv.step("alice", capture=Capture("resid_post", layers=1, span=Span(last=3), reduce="mean"))
    [act] = counted.activations
    assert len(act.positions) == 3, "a span that counts from the end is reduced at the end"


# -- engines that run row by row, layers that lie elsewhere


@pytest.mark.parametrize("cached", [True, False])
def test_the_slow_engine_edits_what_it_runs_again_too(model, cached, monkeypatch):
    """Without a cache of its own every step is a pass over everything, whose past is edited as it was."""
    if not cached:
        monkeypatch.setattr("interlens.engine.slow.continues", lambda model: False)
    where = Where(prompt=frozenset({3, 39}), reply=True)
    plan = RowPlan(
        captures=(("resid_post", 1),), prompt=(3, 39), generated=True, edits=(edit("add", 2.0, where=where),)
    )
    rows = [row(IDS, 6, sampling=GREEDY, plan=plan), row(prompt(9, 9), 3)]
    fast, slow = (drive(kind(model), rows)[0] for kind in (Engine, SlowEngine))
    assert fast.ids == slow.ids
    assert torch.allclose(fast.logits, slow.logits, atol=1e-4)
    assert torch.allclose(fast.done.captures["resid_post.1"], slow.done.captures["resid_post.1"], atol=1e-4)
    [receipt] = slow.done.receipts
    assert receipt["positions"] == fast.done.receipts[0]["positions"]


def test_a_family_that_grows_beyond_its_frequencies_is_edited_there():
    model = FAMILIES["llama_dynamic"].make()
    engine = engine_for(model, fits=examine(model).fits)
    ids = prompt(40, 3, 256)
    where = Where(prompt=frozenset({5, 39}), reply=True)
    [found] = drive(
        engine, [row(ids, 5, sampling=GREEDY, plan=RowPlan(edits=(edit("add", 2.0, where=where),)))]
    )
    [plain] = drive(engine, [row(ids, 5, sampling=GREEDY)])
    assert (found.logits[0] - plain.logits[0]).abs().max() > 1e-2
    [receipt] = found.done.receipts
    assert receipt["positions"] == 2 + len(found.ids) - 1


def test_a_sharded_model_is_edited_where_its_layers_are(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    sharded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    quick.equip(sharded)
    plans = [
        RowPlan(captures=(("attn_out", 1),), prompt=(39,), generated=True, edits=(edit("add", 2.0, site, n),))
        for site, n in (("resid_post", 1), ("mlp_out", 0), ("z", 1))
    ]
    rows = [row(IDS, 4, sampling=GREEDY, plan=plan) for plan in plans]
    for found, wanted in zip(drive(Engine(sharded), rows), drive(Engine(packed_tiny()), rows), strict=True):
        assert found.ids == wanted.ids
        assert torch.allclose(found.logits, wanted.logits, atol=1e-4)
        assert torch.allclose(
            found.done.captures["attn_out.1"], wanted.done.captures["attn_out.1"], atol=1e-4
        )


def test_a_direction_brings_its_site():
    there = Direction(V, site="mlp_out", layer=1)
    for push in (Steer(there), Ablate(there)):
        assert (push.site, push.layers) == ("mlp_out", (1,))
        assert dataclasses.replace(push, layers=0).site == "mlp_out"
    assert Steer(there, site="resid_post").site == "resid_post"
    assert Steer(V, layers=1).site == Steer(Direction(V, layer=1)).site == "resid_post"
    assert Steer(Direction(V, site="embeddings")).addresses(2) == [("embeddings", 0)]
    with pytest.raises(ValueError, match="logits can be captured and not edited"):
        Steer(Direction(V, site="logits"))
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=3)
    said = Conversation([alice], shared_context="Go.").step("alice", steer=Steer(there, coef=2.0))
    assert [(r["site"], r["layer"]) for r in said.metadata["receipts"]] == [("mlp_out", 1)]
