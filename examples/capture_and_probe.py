"""Whose words are these? A linear probe on the residual stream tells two personas apart, layer by layer.

Each persona's replies are captured while they are made, as one mean per turn; folds are held out, and labels
are shuffled for the control. Replies of one conversation may lie in several folds.
"""

from interlens import AutoModelParticipant, Capture, Conversation, Span
from interlens.interp.probes import sweep

PERSONAS = {"joy": "You are cheerful and love everything.", "glum": "You are gloomy and hate everything."}

people = [
    AutoModelParticipant.from_pretrained("smollm2", name=name, system_prompt=prompt, max_new_tokens=16)
    for name, prompt in PERSONAS.items()
]
said = Capture("resid_post", span=Span(phase="generated", part="content"), reduce="mean")  # every layer
conv = Conversation(people, shared_context="What do you think of Mondays?").turns(2)
report = conv.hook(said).rollout(n=12, seed=0)
print(report)

found = report.activations(site="resid_post")
where, tensor = found.frame(), found.tensor
layers = {n: tensor[(where.layer == n).tolist()] for n in sorted(where.layer.unique())}
labels = where[where.layer == 0].participant.tolist()  # the rows of every layer are in the same order
table = sweep(layers, labels, folds=4)
print(table.iloc[:: max(1, len(table) // 6)].round(2).to_string(index=False))
best = table.loc[table.accuracy.idxmax()]
print(f"best layer {best.layer:.0f}: {best.accuracy:.2f}, with shuffled labels {best.shuffled:.2f}")
