"""A trace is a pass over the ids of the turn with its edits, and leaves the module as it was."""

import importlib.metadata
import threading

import pytest
import torch

from interlens import Capture, Conversation
from interlens.interp import tracing
from interlens.interp.edits import Steer
from interlens.pretrained import AutoModelParticipant

V = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture
def conv():
    people = [
        AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=5) for n in ("alice", "bob")
    ]
    conv = Conversation(people, shared_context="Say something.")
    conv.step("alice", steer=Steer(V, layers=0, coef=2.0), capture=Capture("resid_post", layers=1))
    conv.step("bob")
    return conv


def state(model):
    return [
        (m.__dict__.get("forward"), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
    ]


def test_it_sees_what_the_turn_saw(conv):
    model = conv.participant("alice").model
    before = state(model)
    with conv.trace("alice") as t:
        hidden = t.nn.model.layers[1].output.save()
    assert state(model) == before
    message = conv.transcript[1]
    kept = message.activations.at(layer=1)
    assert torch.allclose(hidden[0, : len(kept)], kept, atol=1e-4)
    assert hidden.shape[1] == len(message.prompt_ids) + len(message.token_ids)
    with conv.trace("alice", edits=False) as t:
        plain = t.nn.model.layers[1].output.save()
    assert (plain[0, -3:] - hidden[0, -3:]).abs().max() > 1e-2


def test_gradients_are_there_when_asked_for(conv):
    with conv.trace("bob", grad=True) as t:
        hidden = t.nn.model.layers[0].output.save()
    assert hidden.requires_grad
    with conv.trace("bob") as t:
        hidden = t.nn.model.layers[0].output.save()
    assert not hidden.requires_grad


def test_gradients_pass_through_an_edit(conv):
    """Adding a vector has the gradient of the identity; the edited token is no dead end."""
    with conv.trace("alice", grad=True) as t:
        early = t.nn.model.layers[0].input.save()
        loss = t.nn.model.layers[1].output[0, -1].sum().save()
    [grad] = torch.autograd.grad(loss, early)
    assert grad[0, -1].abs().sum() > 0, "the last token was edited in layer 0"


def test_a_tracer_that_is_never_entered_leaves_nothing(conv):
    model = conv.participant("bob").model
    before = state(model)
    conv.trace("bob")
    assert state(model) == before
    assert not any("__nnsight__" in m.__dict__ for m in model.modules())
    with pytest.raises(ZeroDivisionError), conv.trace("bob"):
        1 / 0  # noqa: B018
    assert state(model) == before


def test_the_conversation_goes_on_as_if_nothing_had_been(conv):
    other = conv.branch()
    with conv.trace("bob") as t:
        t.nn.model.layers[0].output.save()
    assert conv.step("alice") == other.step("alice")


def test_what_cannot_be_traced_is_said(conv, monkeypatch):
    with pytest.raises(LookupError, match="bob has no turn 7; it spoke in the turns"):
        conv.trace("bob", 7)
    with tracing._ONE, pytest.raises(Exception, match="one at a time"), conv.trace("bob") as t:
        t.nn.model.layers[0].output.save()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.2")
    with pytest.raises(
        tracing.TraceError, match=r"works with nnsight 0.8 up to, not including, 0.9; installed is 0.9.2"
    ):
        conv.trace("bob")


def test_a_trace_waits_for_the_engine(conv):
    """Its pass holds the model's lock, so no step of the engine meets the wrapped module."""
    backend = conv.participant("bob").resident
    seen = []

    def look(module, args, out):
        seen.append(backend.lock.acquire(blocking=False) or threading.current_thread().name)

    with backend.model.model.layers[0].register_forward_hook(look), conv.trace("bob") as t:
        t.nn.model.layers[0].output.save()
    assert seen
    backend.lock.release()
