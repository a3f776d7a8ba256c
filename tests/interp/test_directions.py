"""Directions and probes: how they are made, what they keep, and files of other tools."""

import math
from dataclasses import replace

import pytest
import torch

from interlens import Capture, Conversation, Direction, Probe
from interlens.errors import StoreError
from interlens.interp.capture import Activations
from interlens.interp.probes import sweep
from interlens.pretrained import AutoModelParticipant

D = 24
TRUE = torch.randn(D, generator=torch.Generator().manual_seed(0))


def cloud(n, shift, seed):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)) + shift * TRUE


A, B = cloud(80, 1.0, 1), cloud(80, -1.0, 2)


@pytest.mark.parametrize("method", ["mean", "pca", "logistic"])
def test_a_contrast_finds_what_differs(method):
    found = Direction.from_contrast(A, B, method=method, layer=3)
    assert found.cosine(TRUE) > 0.8
    assert float(found.project(A).mean() - found.project(B).mean()) > 0, "from b towards a"
    assert Direction.from_contrast(B, A, method=method).cosine(TRUE) < -0.8
    assert (found.method, found.layer, found.site) == (method, 3, "resid_post")


def test_lengths_can_be_compared_across_methods():
    gap = A.mean(0) - B.mean(0)
    for method in ("pca", "logistic"):
        found = Direction.from_contrast(A, B, method=method)
        assert found.norm == pytest.approx(abs(float(gap @ found.vector) / found.norm), rel=1e-4)
    assert torch.allclose(Direction.from_contrast(A, B).vector, gap, atol=1e-6)


def test_the_scale_is_kept_and_the_control_has_it_too():
    direction = Direction(TRUE * 7, layer=2)
    assert torch.equal(direction.vector, TRUE * 7)
    controls = [direction.random_like(s) for s in range(5)]
    assert all(c.norm == pytest.approx(direction.norm, rel=1e-5) for c in controls)
    assert all(c.layer == 2 for c in controls)
    assert torch.equal(controls[0].vector, direction.random_like(0).vector)
    assert not torch.equal(controls[0].vector, controls[1].vector)
    h = torch.randn(4, 5, D, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(direction.project(h), h @ TRUE / TRUE.norm(), atol=1e-5)


def test_what_is_no_direction_is_said():
    for bad, said in (
        (torch.full((D,), math.nan), "NaN"),
        (torch.zeros(D), "zero"),
        (torch.ones(3, D), "one vector"),
    ):
        with pytest.raises(ValueError, match=said):
            Direction(bad)
    with pytest.raises(ValueError, match="24 numbers per example, the other 23"):
        Direction.from_contrast(A, B[:, 1:])
    with pytest.raises(ValueError, match="method is"):
        Direction.from_contrast(A, B, method="median")
    with pytest.raises(ValueError, match="participant="):
        Direction.from_contrast(["a"], ["b"])
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    both = alice.forward("abc", capture=Capture("resid_post")).activations
    with pytest.raises(ValueError, match=r"captured in the layers \[0, 1\]: say which"):
        Direction.from_contrast(both, both)
    with pytest.raises(TypeError, match="fold"):
        Probe.fit(A, [0, 1] * 40, fold=5)


def test_conversations_reports_and_texts_are_sides():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=4)
    capture = Capture("resid_post", layers=1, reduce="mean")
    report = Conversation(alice, shared_context="Hi.").hook(capture).turns(2).rollout(n=3, progress=False)
    talks = list(report.conversations().values())
    live = Conversation(alice, shared_context="Ho.").hook(capture)
    live.run(2)
    from_report = Direction.from_contrast(report, live, layer=1)
    assert from_report.facts == {"a": 6, "b": 2}
    assert torch.allclose(from_report.vector, Direction.from_contrast(talks, [live], layer=1).vector)
    texts = Direction.from_contrast(["ab", "cd"], ["ef"], layer=1, participant=alice)
    one = torch.cat([alice.forward(t, capture=capture).activations.at() for t in ("ab", "cd")]).mean(0)
    assert torch.allclose(
        texts.vector, one - alice.forward("ef", capture=capture).activations.at()[0], atol=1e-5
    )


def test_position_0_is_in_no_contrast(tmp_path):
    """The attention sink, whose norm would be most of a mean, is left out as it is of a captured mean."""
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=4)
    long, short = (
        Conversation(alice, shared_context=text).hook(Capture(layers=1)).turns(1)
        for text in ("Hi, " * 9, "Ho.")
    )
    reports = [c.rollout(n=2, out_dir=tmp_path / n, progress=False) for c, n in ((long, "a"), (short, "b"))]
    for conv in (long, short):
        conv.run()
    x, y = (c.transcript[1].activations.at().float() for c in (long, short))
    made = Direction.from_contrast(long, short, layer=1)
    assert torch.allclose(made.vector, x[1:].mean(0) - y[1:].mean(0), atol=1e-5)
    assert made.facts == {"a": len(x) - 1, "b": len(y) - 1, "without_position_0": {"a": 1, "b": 1}}
    acts = [c.transcript[1].activations for c in (long, short)]
    for sides in (acts, [a.query(layer=1) for a in acts], [[long], [short]]):
        assert torch.equal(Direction.from_contrast(*sides, layer=1).vector, made.vector)
    parts = [
        torch.cat([r.activations.at().float()[1:] for r in report.results.values()]).mean(0)
        for report in reports
    ]
    for sides in (reports, [r.activations(site="resid_post.1") for r in reports]):
        found = Direction.from_contrast(*sides, layer=1)
        assert torch.allclose(found.vector, parts[0] - parts[1], atol=1e-5)
        assert found.facts["without_position_0"] == {"a": 2, "b": 2}
    alone = [
        Activations([replace(a.items[0], positions=(0,), tensor=t[:1])])
        for a, t in zip(acts, (x, y * 2), strict=True)
    ]
    only = Direction.from_contrast(*alone, layer=1)
    assert torch.allclose(only.vector, x[0] - 2 * y[0]), "what was asked for, where there is nothing else"
    assert only.facts == {"a": 1, "b": 1}


def test_a_site_of_the_model_has_no_layer_to_say():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=4)
    recipe = Conversation(alice, shared_context="Hi.").hook(Capture(("embeddings", "final_norm"))).turns(1)
    report = recipe.rollout(n=1, progress=False)
    conv = recipe.seed(7)
    conv.run()
    for site in ("embeddings", "final_norm"):
        made = Direction.from_contrast(report, conv, site=site)
        assert torch.equal(made.vector, Direction.from_contrast(report, conv, site=site, layer=0).vector)
        read, other = (alice.forward(t, capture=Capture(site, reduce="mean")) for t in ("ab", "ef"))
        texts = Direction.from_contrast(["ab"], ["ef"], site=site, participant=alice)
        assert torch.allclose(texts.vector, (read.activations.at() - other.activations.at())[0], atol=1e-5)
        for layer in (None, 0):
            direction = Direction(made.vector, site=site, layer=layer)
            frame, tinted = conv.project(direction), conv.tint(direction)
            assert tinted.name == f"projection at {site}"
            values = tinted.shades[1].values
            row = frame[frame.message == 1].iloc[0]
            assert sum(values) / len(values) == pytest.approx(row.projection, abs=1e-4)
        with pytest.raises(ValueError, match=f"{site} belongs to no layer; leave layers= out"):
            conv.project(Direction(made.vector, site=site, layer=1))
    for look in (conv.project, conv.tint):
        with pytest.raises(ValueError, match="does not say its layer: give it one, layer=12"):
            look(Direction(made.vector))


def test_directions_and_probes_are_kept(tmp_path):
    direction = Direction.from_contrast(A, B, layer=5)
    direction.save(tmp_path / "d.safetensors")
    again = Direction.load(tmp_path / "d.safetensors")
    assert torch.equal(again.vector, direction.vector)
    assert (again.layer, again.method, again.facts) == (5, "mean", {"a": 80, "b": 80})
    probe = Probe.fit(torch.cat([A, B]), ["good"] * 80 + ["bad"] * 80, layer=5, folds=5)
    probe.save(tmp_path / "p.safetensors")
    loaded = Probe.load(tmp_path / "p.safetensors")
    assert torch.equal(loaded.apply(A), probe.apply(A))
    assert loaded.facts == probe.facts
    assert loaded.facts["accuracy"] > 0.95
    with pytest.raises(StoreError, match="holds no probe"):
        Probe.load(tmp_path / "d.safetensors")


def test_a_probe_knows_whose_activations_it_reads(tmp_path):
    alice, bob = (AutoModelParticipant.from_pretrained("tiny", name=n) for n in ("alice", "bob"))
    other = AutoModelParticipant.from_pretrained("tiny", name="carol", chat_template="{{ messages }}")
    probes = [Probe.fit(torch.cat([A, B]), [1] * 80 + [0] * 80, participant=p) for p in (alice, bob, other)]
    facts = [p.facts for p in probes]
    assert facts[0] == facts[1]
    assert facts[0]["model"]["model"] == "tiny"
    assert facts[2]["template"] != facts[0]["template"]
    probes[0].save(tmp_path / "p.safetensors")
    assert Probe.load(tmp_path / "p.safetensors").facts == facts[0]


def test_a_probe_is_scikit_learn_s():
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x, y = torch.cat([A, B]), [1] * 80 + [0] * 80
    probe = Probe.fit(x, y, c=0.1)
    scaler = StandardScaler().fit(x.numpy())
    theirs = LogisticRegression(C=0.1, max_iter=2000).fit(scaler.transform(x.numpy()), y)
    wanted = theirs.predict_proba(scaler.transform(x.numpy()))[:, 1]
    assert torch.allclose(probe.apply(x), torch.tensor(wanted, dtype=torch.float32), atol=1e-4)
    three = Probe.fit(torch.cat([A, B, A + 9]), ["a"] * 80 + ["b"] * 80 + ["c"] * 80)
    assert three.apply(A).shape == (80, 3)
    assert three.score(A + 9, ["c"] * 80) > 0.95
    with pytest.raises(ValueError, match="all 80 labels"):
        Probe.fit(A, [1] * 80)
    with pytest.raises(ValueError, match="160 activations and 80 labels"):
        Probe.fit(x, [1] * 80)


def test_a_sweep_tells_where_it_is_and_what_chance_is():
    layers = {0: torch.randn(160, D, generator=torch.Generator().manual_seed(9)), 1: torch.cat([A, B])}
    frame = sweep(layers, [1] * 80 + [0] * 80).set_index("layer")
    assert frame.accuracy[1] > 0.95
    assert 0.3 < frame.accuracy[0] < 0.7
    assert frame.shuffled.between(0.3, 0.7).all()


def test_persona_vectors_are_by_hidden_states_index(tmp_path):
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice")
    ids = tuple(range(5, 15))
    with torch.no_grad():
        hidden = alice.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.save(torch.stack([h[0].mean(0) for h in hidden]), tmp_path / "v.pt")
    for layer in (0, -2):
        found = Direction.from_persona(tmp_path / "v.pt", layer)
        own = alice.forward(ids, capture=Capture("resid_post", layers=layer)).activations.at()
        assert found.layer == 0
        assert torch.allclose(found.vector, own.mean(0), atol=1e-4), "row L + 1 is the output of layer L"
    with pytest.raises(StoreError, match=r"of 2 layers \(0-1\)"):
        Direction.from_persona(tmp_path / "v.pt", 2)


def test_control_vectors_of_repeng_are_by_layer(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "v.gguf"), "controlvector")
    for layer in (1, 2):
        writer.add_tensor(f"direction.{layer}", (TRUE * layer).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Direction.from_gguf(tmp_path / "v.gguf", 2)
    assert (found.layer, found.site) == (2, "resid_post")
    assert torch.allclose(found.vector, TRUE * 2)
    with pytest.raises(StoreError, match=r"it has \[1, 2\]"):
        Direction.from_gguf(tmp_path / "v.gguf", 7)


def test_a_contrast_has_the_layer_of_what_was_captured_and_never_two():
    numbers = iter(range(99))

    def acts(*layers):
        alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=4)
        conv = Conversation([alice], shared_context=f"Go, {next(numbers)}.")
        conv.step("alice", capture=Capture(layers=list(layers)))
        return conv

    one, two = acts(0), acts(1)
    assert Direction.from_contrast(one, [acts(0)]).layer == 0
    assert Direction.from_contrast(two.transcript[-1].activations, acts(1)).layer == 1
    for sides in ((one, two), ([one], two.transcript[-1].activations), (acts(0, 1), one)):
        with pytest.raises(ValueError, match=r"captured in the layers \[0, 1\]: say which, layer=0"):
            Direction.from_contrast(*sides)
    assert Direction.from_contrast(acts(0, 1), acts(0, 1), layer=1).layer == 1
