"""Two personas debate; what the model holds at two layers is captured while they talk."""

from interlens import AutoModelParticipant, Capture, Conversation, Span

ana = AutoModelParticipant.from_pretrained(
    "smollm2", name="ana", system_prompt="You love books.", max_new_tokens=32
)
ben = AutoModelParticipant.from_pretrained(
    "smollm2", name="ben", system_prompt="You love screens.", max_new_tokens=32
)
conv = Conversation([ana, ben], shared_context="Should the town keep its old library?")

with conv.capture(Capture(layers=(10, 20), span=Span(phase="generated"), reduce="mean")) as acts:
    conv.run(4, show=True)

print(acts.frame().to_string(index=False))
