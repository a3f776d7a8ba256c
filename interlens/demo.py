"""`interlens demo`: two personas talk on a real model, are looked into while they do, and are run many times.

The same ten lines a user would type, with a kill -9 in the middle of the rollout.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from interlens.chat.spans import Span
from interlens.conversation import Conversation
from interlens.interp.capture import Activations, Capture
from interlens.notebook import plots
from interlens.pretrained import AutoModelParticipant
from interlens.runner.ledger import index_records
from interlens.runner.report import RunReport

SCENARIO = (
    "The town wants to replace its old library with a digital centre. Discuss it in short, friendly replies."
)
PERSONAS = {
    "ana": "You are Ana, a librarian who loves paper books and quiet rooms. Reply in two sentences.",
    "ben": "You are Ben, a young engineer who loves screens and fast networks. Reply in two sentences.",
}


def conversation(model: str = "smollm2") -> Conversation:
    """Two personas on one model, four turns."""
    people = [
        AutoModelParticipant.from_pretrained(
            model,
            name=name,
            system_prompt=persona,
            temperature=0.8,
            repetition_penalty=1.15,
            max_new_tokens=48,
        )
        for name, persona in PERSONAS.items()
    ]
    recipe: Conversation = Conversation(people, shared_context=SCENARIO).turns(4)
    return recipe


def rollout(folder: str | Path, model: str = "smollm2", progress: bool | None = None) -> RunReport:
    """Eight runs of the conversation, at most four alive, kept in a folder."""
    return conversation(model).rollout(n=8, out_dir=folder, max_batch_size=4, progress=progress)


def main(folder: str | Path = "demo-output", model: str = "smollm2") -> int:
    """Run the demo; write the picture, the run folder and the report into `folder`."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    conv = conversation(model)
    n_layers = AutoModelParticipant.from_pretrained(model, name="model").n_layers or 0
    layers = (n_layers // 3, 2 * n_layers // 3)
    _say(f"1. {conv!r} on {model}. The words come as they are sampled; layers {layers} are captured.")
    everything = Capture(layers=layers, span=Span(phase="generated"))
    with conv.capture(everything) as acts:
        conv.run(show=True)
    _say("2. What was captured, from the very forward passes that made the text:")
    sys.stdout.write(acts.frame().round(1).to_string(index=False) + "\n")
    _say(f"   picture: {picture(acts, out / 'activations.png')}")
    run = out / f"run-{time.time_ns() // 1_000_000}"
    _say("3. The same object, eight times, in another process that is killed half way:")
    killed = kill_half_way(run, model)
    _say(f"   killed -9 with {killed} of 8 conversations on disk; the same call goes on:")
    report = rollout(run, model, progress=True)
    _say(f"   {report!r}; read back, not run again: {len(report.skipped)}")
    path = report.save_html(out / "report.html")
    _say(f"4. The report: {path}. All in {time.monotonic() - began:.0f} s.")
    return 0 if report.complete and not report.failed else 1


def picture(acts: Activations, path: Path) -> Path:
    """How alike the turns are at the two layers, by the mean activation of their words."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    layers = sorted({a.layer for a in acts})
    figure, axes = plt.subplots(1, len(layers), figsize=(10, 4.4), layout="constrained")
    for layer, ax in zip(layers, axes, strict=True):
        plots.similarity(acts, layer=layer, ax=ax)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def kill_half_way(run: Path, model: str) -> int:
    """Start the rollout in a child process, kill it once some conversations are on disk; return how many."""
    code = f"from interlens.demo import rollout; rollout({str(run)!r}, {model!r}, progress=False)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            while child.poll() is None and _recorded(run) < 4:
                time.sleep(0.02)
        finally:
            child.kill()
    return _recorded(run)


def _recorded(run: Path) -> int:
    return len(index_records(run)) if (run / "seg").is_dir() else 0


def _say(text: Any) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()
