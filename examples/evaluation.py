"""Twenty sums, with and without an example in the prompt: two results, paired by task.

`Rows` asks and grades; the gold is in no message. `run_batch(out_dir=…)` keeps a run and goes on with it.
"""

from interlens.backends import HuggingFaceBackend
from interlens.evaluation import Rows, TrajectoryRunner

rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 6) for b in range(2, 6)]
PROMPTS = {
    "plain": "{question} Answer with the number.",
    "example": "What is 1 + 1? Answer with the number. It is 2. {question} Answer with the number.",
}

backend = HuggingFaceBackend("smollm2")
results = {}
for name, prompt in PROMPTS.items():
    sums = Rows(rows, extractor="numeric", prompt=prompt, name=name)
    runner = TrajectoryRunner(sums, backend, {"temperature": 0.0, "max_tokens": 16})
    results[name] = runner.run_batch(batch_size=20)
    print(results[name])

print(results["plain"].signals().to_string(index=False))
print(results["plain"].frame()[["task", "success", "tokens", "action"]].head(4).to_string(index=False))
print("plain beside example:", results["plain"].compare(results["example"]))
