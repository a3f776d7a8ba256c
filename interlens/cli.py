"""The command line: a thin skin on the calls of the library. The exit status says what happened.

0: all went well; 1: something failed, or is not complete; 2: the command was not understood.
"""

import argparse
import itertools
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

from interlens import __version__, demo, kept, written
from interlens.backends import cancel_batches
from interlens.engine.load import bundled_gguf
from interlens.errors import InterlensError, Stopped, nearest
from interlens.evaluation.config import EvalConfig
from interlens.process import available_devices
from interlens.runner.report import RunReport
from interlens.runner.store import BATCHES, read_manifest
from interlens.yamlfile import Misread


def parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    top = argparse.ArgumentParser(
        prog="interlens", description="Language models that talk, looked into while they do."
    )
    top.add_argument("--version", action="version", version=f"interlens {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    one = commands.add_parser("demo", help="two personas talk, are captured, rolled out, killed and resumed")
    one.add_argument(
        "--out", default="demo-output", help="folder for what the demo writes (default: demo-output)"
    )
    one.add_argument("--model", default="smollm2", help="model id or folder (default: the bundled smollm2)")
    one = commands.add_parser("run", help="run a recipe written in YAML")
    one.add_argument("recipe", help="the YAML file")
    one.add_argument(
        "--out",
        metavar="DIR",
        type=_folder,
        help="the run's folder (default: the recipe's out_dir, else runs/ and the file's name)",
    )
    one = commands.add_parser("resume", help="go on with the run in a folder")
    one.add_argument("folder", help="the run's out_dir")
    one = commands.add_parser("report", help="what a run folder holds")
    one.add_argument("folder", help="the run's out_dir")
    one.add_argument("--html", metavar="FILE", help="also write one self-contained file")
    one = commands.add_parser("view", help="read what was said: in the jobs named, or else those that failed")
    one.add_argument("folder", help="the run's out_dir")
    one.add_argument("jobs", nargs="*", metavar="job", help="ids of jobs, as report lists them")
    one = commands.add_parser("cancel", help="ask providers to end the batches that a run waits for")
    one.add_argument("folder", help="the run's out_dir")
    one = commands.add_parser("eval", help="run an evaluation written in YAML")
    one.add_argument("config", help="the YAML file")
    one.add_argument(
        "--out", metavar="DIR", type=_folder, help="keep the run in this folder, and go on with it"
    )
    commands.add_parser("doctor", help="versions, devices, and whether the bundled model is there")
    return top


def _folder(name: str) -> Path:
    if not name.strip():
        raise argparse.ArgumentTypeError("it names no folder")
    return Path(name)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status."""
    asked = parser().parse_args(arguments)
    try:
        return _do(asked)
    except Misread as error:
        print(f"interlens: {error}", file=sys.stderr)
        return 2
    except (InterlensError, ValueError, OSError) as error:
        print(f"interlens: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        if isinstance(stop, Stopped):
            print(f"interlens: {stop}", file=sys.stderr)
        print(
            "interlens: stopped; what was finished is kept, and the same command goes on with it",
            file=sys.stderr,
        )
        return 130


def _do(asked: argparse.Namespace) -> int:
    if asked.command == "demo":
        return demo.main(asked.out, asked.model)
    if asked.command == "run":
        return _run(asked.recipe, asked.out)
    if asked.command == "resume":
        return _told(kept.resume(asked.folder, progress=True), asked.folder)
    if asked.command == "eval":
        return _eval(asked.config, asked.out)
    if asked.command == "view":
        return _view(asked.folder, asked.jobs)
    if asked.command == "cancel":
        return _cancel(Path(asked.folder))
    return _report(asked.folder, asked.html) if asked.command == "report" else _doctor()


def _run(recipe: str, out: Path | None) -> int:
    found = written.read(recipe)
    folder = out or found.options.get("out_dir") or Path("runs") / Path(recipe).stem
    return _told(kept.run(found, folder, progress=True), folder)


def _told(report: RunReport, folder: str | Path) -> int:
    """Say how a run ended, and what can be done with it."""
    where = shlex.quote(str(folder))
    print(report)
    print(f"look at it: interlens report {where} --html report.html")
    if report.failed or not report.complete:
        print(f"go on with what failed or is missing: interlens resume {where}")
    return _status(report)


def _eval(config: str, out: Path | None) -> int:
    read = EvalConfig.from_yaml(config)
    found = read.run(out, progress=True)
    for one in found:
        print(one)
        print(one.signals().to_string(index=False))
    if (folder := out or read.out_dir) is not None:
        print(f"what failed is tried again by the same command; read it: BatchResult.load({str(folder)!r})")
    return 1 if any(one.failed for one in found) else 0


def _cancel(folder: Path) -> int:
    read_manifest(folder)  # raises where there is no run
    found = cancel_batches(folder / BATCHES)
    for batch, what in found.items():
        print(f"{batch}: {what}")
    if not found:
        print(f"no batch of {folder} is on its way")
    return 1 if any(what.startswith("not ") for what in found.values()) else 0


def _status(report: RunReport) -> int:
    whole = report.complete and not report.failed and not report.counts()["analysis_failed"]
    return 0 if whole else 1


def _report(folder: str, html: str | None) -> int:
    report = RunReport.load(folder)
    print(report)
    print(report.frame().to_string(index=False, max_colwidth=60))
    if html is not None:
        print(f"written: {report.save_html(html)}")
    return _status(report)


def _view(folder: str, jobs: list[str]) -> int:
    report = RunReport.load(folder)
    for job in jobs:
        if job not in report.results:
            raise ValueError(
                f"{folder} has no job {job!r}: {nearest(job, itertools.islice(report.results, 50))}"
            )
    chosen = jobs or report.failed or [*itertools.islice(report.results, 1)]
    for job in chosen:
        result = report.results[job]
        parts = [repr(result), result.transcript.pretty(), result.error]
        if result.analysis is not None:
            parts.append(f"analysis: {result.analysis}")
        print("\n\n".join(part for part in parts if part), end="\n\n")
    if not jobs:
        print(f"{len(chosen)} of {len(report)} jobs; read others: interlens view {shlex.quote(folder)} JOB")
    return 0


def _doctor() -> int:
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "transformers", "tokenizers", "nnsight"):
        print(f"{package} {metadata.version(package)}")
    print(f"devices: {', '.join(available_devices())}")
    print(f"bundled model: {bundled_gguf().name}")
    return 0
