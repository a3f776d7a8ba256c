"""A participant that may call functions: a tool's signature and docstring are what the model is told.

The bundled model is too small to call anything here (`--model` names another); so that the loop can be seen,
a script stands in for a model that calls.
"""

import argparse
import json

from interlens import AutoModelParticipant, Conversation, ModelParticipant, dataset_field
from interlens.testing import ScriptedBackend


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def calling(request):
    """What a model that knows its tools would say."""
    last = request.prompt.messages[-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    a, b = (int(word.strip("?")) for word in last["content"].split() if word.strip("?").isdigit())
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>"


def used(conv):
    """What was called in the last turn, and what came back."""
    trail = conv.transcript[-1].metadata.get("tool_trail", [])
    pairs = [pair for step in trail for pair in zip(step["calls"], step["results"], strict=True)]
    calls = [f"{call['name']}({call['arguments']}) = {result}" for call, result in pairs]
    return {"calls": "; ".join(calls), "answer": conv.transcript[-1].content[:40]}


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2", help="a hub id or a folder")
which = parser.parse_args().model
model = AutoModelParticipant.from_pretrained(
    which, name="model", tools=[add], temperature=0.0, max_new_tokens=32
)
script = ModelParticipant(name="script", backend=ScriptedBackend(calling), tools=[add])

rows = [{"question": f"What is {a} + {b} ?"} for a, b in ((2, 3), (12, 7), (40, 41))]
for solver in (model, script):
    recipe = Conversation([solver], shared_context=dataset_field("question")).turns(1).data(rows)
    frame = recipe.analyzer(used).rollout().frame()
    print(f"\n{solver.name}, {which if solver is model else 'no model'}")
    print(frame[["row.question", "tokens", "analysis.calls", "analysis.answer"]].to_string(index=False))
