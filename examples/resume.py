"""A run that goes on where it ended.

    python examples/resume.py --out runs/resume    # stop it with Ctrl-C or kill -9, then call it again

Without --out a temporary folder is used, and both halves are shown in one call.
"""

import argparse
import tempfile

from interlens import AutoModelParticipant, Conversation, RunReport
from interlens.errors import Stopped

parser = argparse.ArgumentParser()
parser.add_argument("--out", help="the run's folder")
out = parser.parse_args().out
folder = out or tempfile.mkdtemp()

ana, ben = (
    AutoModelParticipant.from_pretrained("smollm2", name=name, max_new_tokens=16) for name in ("ana", "ben")
)
recipe = Conversation([ana, ben], shared_context="Plan a small party.").turns(2)

if out is None:
    print("first: ", recipe.rollout(n=2, out_dir=folder))  # as if it had ended here
try:
    report = recipe.rollout(n=6, out_dir=folder, extend=True)  # more jobs than there were: say so
except Stopped as stopped:
    print(stopped.report)
    raise SystemExit(f"the same call goes on with {folder}") from None
print("then:  ", report, "read back:", report.skipped)

again = RunReport.load(folder)  # from the folder alone
print("loaded:", again, f"{again.tokens_generated} tokens")
alone = recipe.seed(4)  # what job 4 says does not depend on when, or beside whom, it ran
print("job 4 alone says the same:", alone.run() == again["rollout_00004"].transcript)
