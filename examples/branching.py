"""What would have been said otherwise? One message is changed, everything else is kept, seeds are paired.

Both branches draw from the same random stream, so that they differ only by the words that were put in.
"""

from interlens import AutoModelParticipant, Conversation

ana, ben = (
    AutoModelParticipant.from_pretrained("smollm2", name=name, max_new_tokens=20) for name in ("ana", "ben")
)
conv = Conversation([ana, ben], shared_context="Shall we go to the sea or to the hills?")
conv.run(2)

sea, hills = conv.branch_from(1), conv.branch_from(1)  # both end with ana's first words
sea.edit(1, "I would love to swim in the sea.")
hills.edit(1, "I would love to walk in the hills.")
same = conv.branch_from(1).step("ben", logprobs=True)
print("again, unchanged:", same.token_ids == conv.transcript[2].token_ids)

for branch in (sea, hills):
    branch.step("ben", logprobs=True)
    branch.step("ana", logprobs=True)
    print(f"\n{branch.transcript.pretty()}")
table = sea.compare(hills)[["message", "author", "same", "logprob_a", "logprob_b"]]
print(table.round(2).to_string(index=False))

drawn = [branch.branch_from(1).sample("ben", n=5) for branch in (sea, hills)]  # five draws each, not kept
for word in ("sea", "hill"):
    counts = [sum(word in reply.content.lower() for reply in replies) for replies in drawn]
    print(f"{word!r} in five replies: {counts[0]} after the sea, {counts[1]} after the hills")
