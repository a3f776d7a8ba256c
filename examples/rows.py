"""One conversation per row of data, graded against a column that the model never sees."""

import argparse

from interlens import AutoModelParticipant, Conversation, dataset_field

parser = argparse.ArgumentParser()
parser.add_argument(
    "--out", default=None, help="keep the run in this folder, and go on with it when called again"
)
folder = parser.parse_args().out

rows = [{"question": f"What is {a} + {b}?", "gold": str(a + b)} for a in range(2, 6) for b in range(3, 6)]
solver = AutoModelParticipant.from_pretrained(
    "smollm2", name="solver", system_prompt="Answer with one number.", temperature=0.0, max_new_tokens=16
)


def grade(conv):
    return {"right": conv.row["gold"] in conv.transcript[-1].content}


report = (
    Conversation([solver], shared_context=dataset_field("question"))
    .turns(1)
    .data(rows)
    .analyzer(grade)
    .rollout(out_dir=folder)
)
print(report)
print(report.frame()[["job", "row.question", "row.gold", "analysis.right"]].to_string(index=False))
