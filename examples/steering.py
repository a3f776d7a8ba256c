"""Push one speaker along a direction, and a random one of the same length as the control.

The direction is the difference of means of warm and cold sentences at the middle layer; seeds are the same in
every arm. `projection` is how far the replies lie along it, read before the push is added.
"""

import pandas

from interlens import AutoModelParticipant, Capture, Conversation, Direction, Span, Steer

WARM = ["What a lovely day!", "I am so glad that you came.", "This is wonderful, thank you.", "I love it."]
COLD = ["What a dull day.", "I did not want you here.", "This is terrible, go away.", "I hate it."]

ana = AutoModelParticipant.from_pretrained("smollm2", name="ana", max_new_tokens=16)
layer = ana.n_layers // 2
warm = Direction.from_contrast(WARM, COLD, layer=layer, participant=ana)
print(warm)

words = Span(phase="generated", part="content")
read = Capture("resid_post", layers=layer, span=words, reduce=warm, when="before")
conv = Conversation([ana], shared_context="How is the weather in your town?").hook(read).turns(1)

arms = {"none": None}
for coef in (-2.0, 2.0):
    arms[f"warm {coef:+g}"] = Steer(warm, coef=coef)
    arms[f"random {coef:+g}"] = Steer(warm.random_like(), coef=coef)

lines = []
for arm, steer in arms.items():
    report = (conv if steer is None else conv.hook(steer)).rollout(n=6, seed=0)
    projection = report.activations(site=f"resid_post.{layer}").tensor.mean().item()
    first = report["rollout_00000"].transcript[-1].content.replace("\n", " ")
    lines.append({"arm": arm, "projection": projection, "the first of six": first[:60]})
print(pandas.DataFrame(lines).round(2).to_string(index=False))
