"""A benchmark from end to end: one conversation per question, graded against a gold that no model sees.

    python examples/gsm8k_benchmark_rollout.py --out runs/gsm          # arithmetic made by reasoning-gym
    python examples/gsm8k_benchmark_rollout.py --dataset openai/gsm8k  # the test split, from the hub
    python examples/gsm8k_benchmark_rollout.py --matched               # also a pair and a solo of equal cost

The same call with the same --out goes on where the last one ended.
"""

import argparse
import re
from pathlib import Path

from interlens import AutoModelParticipant, Conversation, RunReport, dataset_field, matched_compute
from interlens.errors import require

NUMBER = re.compile(r"(?:(?<!\w)-)?\d[\d,]*(?:\.\d+)?")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one conversation per question, graded")
    parser.add_argument("--model", default="smollm2", help="a hub id, a folder or the bundled smollm2")
    parser.add_argument("--dataset", help="a data set like openai/gsm8k, instead of made questions")
    parser.add_argument("--rows", type=int, default=8, help="how many questions")
    parser.add_argument("--out", type=Path, help="keep the run in this folder, and go on with it")
    parser.add_argument("--devices", nargs="+", help="where to run; all there are, if left out")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="the cap of one turn")
    parser.add_argument("--matched", action="store_true", help="also run a pair against a solo of equal cost")
    return parser.parse_args()


def questions(dataset: str | None, n: int):
    """Rows with a question and an answer that ends with "#### 42", read one at a time."""
    import datasets

    if dataset is not None:
        return datasets.load_dataset(dataset, "main", split="test", streaming=True)
    gym = require("reasoning_gym", "making questions", "eval")
    made = gym.create_dataset("gsm_symbolic", size=n, seed=0)
    rows = [{"question": item["question"], "answer": item["metadata"]["answer_cot"]} for item in made]
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


def with_gold(row: dict) -> dict:
    """The column that only the analyzer sees: the number that the answer ends with."""
    return {"gold": row["answer"].rsplit("####", 1)[1].strip().replace(",", "")}


def grade(conv: Conversation) -> dict:
    """Compare the last number that a participant said with the gold; the question is not searched."""
    said = " ".join(m.content for m in conv.transcript if m.author in conv.names)
    found = [number.replace(",", "") for number in NUMBER.findall(said)]
    answer = found[-1] if found else None
    return {"answer": answer, "right": answer is not None and float(answer) == float(conv.row["gold"])}


def accuracy(name: str, report: RunReport) -> None:
    """Print the share of right answers among all questions: one that failed counts as not right."""
    right = sum(bool(found and found["right"]) for found in report.analyses().values())
    counts = ", ".join(f"{n} {how}" for how, n in report.counts().items())
    share = right / len(report)
    print(f"{name}: {right} of {len(report)} right ({share:.1%}); {counts}; {len(report.skipped)} read back")


def main() -> None:
    args = options()
    settings = {"n": args.rows, "devices": args.devices}
    solver, checker = (
        AutoModelParticipant.from_pretrained(
            args.model, name=name, system_prompt=persona, max_new_tokens=args.max_new_tokens
        )
        for name, persona in (
            ("solver", "Solve the problem step by step; end with 'Final answer: <number>'."),
            ("checker", "Check the solution; correct it, and end with 'Final answer: <number>'."),
        )
    )
    recipe = (
        Conversation([solver], shared_context=("Solve this problem.\n\n", dataset_field("question")))
        .data(questions(args.dataset, args.rows).map(with_gold))
        .analyzer(grade)
    )
    report = recipe.turns(1).rollout(out_dir=args.out and args.out / "solver", **settings)
    accuracy("solver", report)
    columns = ["job", "outcome", "tokens", "row.gold", "analysis.answer"]
    print(report.frame().reindex(columns=columns).to_string(index=False))
    if args.matched:
        pair = recipe.set(participants=[solver, checker]).turns(2)
        both = matched_compute(pair, recipe, out_dir=args.out and args.out / "matched", **settings)
        accuracy("pair", both.pair)
        accuracy("solo of equal cost", both.solo)
        print(both, both.frame().to_string(index=False), sep="\n")


if __name__ == "__main__":
    main()
