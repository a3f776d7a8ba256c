"""Tokens per CPU second: interlens against the engines that the same work could be done with.

Every engine runs in a process of its own, is asked for the same conversations in turn, round by round, and
sleeps while others are measured. README.md in this folder says what is measured, and how.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, OURS, VLLM, WORKLOADS, EngineFailed, Process
from report import Results, table
from workloads import Conversation, Workload, shortened, workloads

from interlens.engine import load


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=load.BUNDLED, help="a folder, smollm2, or tiny")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="ENGINE")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--small", action="store_true", help="see that all runs; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(args)


def model_folder(model: str, scratch: str) -> tuple[str, Any]:
    """A folder of weights that every engine reads, and the tokenizer."""
    if model == load.TINY:
        module, tokenizer = load.tiny()
        with load.quiet():
            module.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        return scratch, tokenizer
    place, extra = load.place_of(model)
    if extra or not Path(place).is_dir():
        raise SystemExit(
            f"--model {model}: a folder of weights in safetensors is needed, for all engines alike"
        )
    return place, load.read_tokenizer(model)


def start(
    asked: argparse.Namespace, folder: str, scratch: str, stack: ExitStack
) -> tuple[dict[str, Process], dict[str, dict[str, Any]]]:
    """Start the engines, all at once: the processes that run, and what each engine says of itself."""
    processes: dict[str, Process] = {}
    told: dict[str, dict[str, Any]] = {}
    for engine in dict.fromkeys(CONTENDERS[name].engine for name in asked.only):
        settings = {"engine": engine, "model": folder, "dtype": asked.dtype, "threads": asked.threads}
        interpreter = asked.vllm if engine == VLLM else sys.executable
        try:
            if interpreter is None:
                raise EngineFailed("--vllm PYTHON was not given")
            processes[engine] = Process(interpreter, settings, Path(scratch) / f"{len(processes)}.log")
            stack.callback(processes[engine].close)
        except EngineFailed as error:
            told[engine] = {"failed": str(error)}
    for engine in list(processes):
        try:
            told[engine] = processes[engine].answer()
        except EngineFailed as error:
            told[engine] = {"failed": str(error)}
            del processes[engine]
    return processes, told


def measure(
    asked: argparse.Namespace, processes: dict[str, Process], works: dict[str, Workload], warm_up: Workload
) -> Results:
    """Give every workload to every engine in every round; each round begins with another engine."""
    results = Results()
    names = [name for name in dict.fromkeys(asked.only) if CONTENDERS[name].engine in processes]

    def give(name: str, work: Workload) -> tuple[dict[str, Any], Sequence[Conversation]]:
        contender, conversations = CONTENDERS[name], work.some(CONTENDERS[name].few)
        message = {"conversations": [asdict(c) for c in conversations], "options": contender.options}
        return processes[contender.engine].ask(message), conversations

    for name in names:
        try:
            give(name, warm_up)
        except EngineFailed as error:
            results.failures |= {(work, name): str(error) for work in CONTENDERS[name].workloads}
    for number in range(asked.rounds):
        first = number % max(1, len(names))
        for work in works:
            for name in names[first:] + names[:first]:
                where = (work, name)
                if work not in CONTENDERS[name].workloads or where in results.failures:
                    continue
                print(f"round {number + 1} of {asked.rounds}: {work}, {name}", file=sys.stderr)
                try:
                    results.add(where, number, *give(name, works[work]))
                except EngineFailed as error:
                    results.failures[where] = str(error)
    return results


def processor() -> str:
    """The processor's name, and which instructions that decide the speed it has."""
    info = Path("/proc/cpuinfo")
    lines = (
        [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line] if info.exists() else []
    )
    found = {key.strip(): value.strip() for key, value in lines}
    flags = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(found.get("flags", "").split())
    return f"{found.get('model name', platform.machine())} ({', '.join(sorted(flags))})"


def footer(record: dict[str, Any], results: Results) -> str:
    """What the figures depend on, in words."""
    settings, samples = record["settings"], [s for by in results.samples.values() for s in by.values()]
    loads = [s["load"] for s in samples] or [0.0]
    whole = any(s["peak_of"] == "process" for s in samples)
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['threads']} thread(s), {settings['rounds']} "
        f"round(s); {record['processor']}, {record['cores']} cores, Python {record['python']}",
        f"load average {min(loads):.2f} to {max(loads):.2f} after each measurement; engines that waited used "
        f"{sum(s['idle_cpu_s'] for s in samples):.1f} CPU s in all",
        "peak: resident memory of the engine's own process, weights and libraries included, highest "
        + ("in its life so far" if whole else "in any run of the workload"),
        f"interlens: of {results.again} conversations that it ran again (another round, alone, captured) "
        f"{results.differing} went another way",
    ]
    for engine, told in record["engines"].items():
        name = ", ".join(n for n in settings["only"] if CONTENDERS[n].engine == engine)
        versions = " ".join(f"{k} {v}" for k, v in told.get("ready", {}).items())
        started = (
            f"{versions}, ready after {told['startup_s']:.0f} s" if versions else f"failed: {told['failed']}"
        )
        lines.append(f"{name}: {started}{', rows exact' if told.get('notes', {}).get('exact') else ''}")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON where asked."""
    asked = parse(args)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder, tokenizer = model_folder(asked.model, scratch)
        every = workloads(tokenizer, asked.small)
        works = {name: every[name] for name in asked.workloads}
        processes, told = start(asked, folder, scratch, stack)
        results = measure(asked, processes, works, shortened(every["W"]))
    record = {
        "settings": {k: v for k, v in vars(asked).items() if k not in ("vllm", "json")},
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "engines": told,
        "workloads": {name: work.about for name, work in works.items()},
        "summary": [results.summary(where) for where in results.samples],
        "failures": [{"workload": w, "engine": e, "why": why} for (w, e), why in results.failures.items()],
        "differing": results.differing,
        "samples": [
            {"workload": w, "engine": e, "round": n, **sample}
            for (w, e), by in results.samples.items()
            for n, sample in by.items()
        ],
    }
    print(table(results, works))
    print(footer(record, results))
    if asked.small:
        print("small workloads: they show that everything runs; the figures mean nothing")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1))
    ours = [name for name in asked.only if name.startswith(OURS)]
    failed = any("failed" in told[CONTENDERS[name].engine] for name in ours)
    failed = failed or any(name in ours for _, name in results.failures)
    return int(failed or not results.samples or results.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
