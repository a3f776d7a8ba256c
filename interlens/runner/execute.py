"""A run from its arguments to its report."""

import functools
import os
import platform
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from interlens import backends
from interlens.backends.batch_journal import pending
from interlens.errors import Stopped
from interlens.request import digest_of
from interlens.runner.executor import Executor, LocalExecutor
from interlens.runner.interrupts import Interrupts
from interlens.runner.jobs import Expansion, LimitOf, Runnable
from interlens.runner.places import Places
from interlens.runner.progress import Observer
from interlens.runner.report import RunReport
from interlens.runner.scheduler import LIVE, scheduler
from interlens.runner.session import Session
from interlens.runner.store import FORMAT, RunStore
from interlens.runner.workers import PoolExecutor


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The arguments of a run."""

    n: int | None = None
    samples: int = 1
    devices: Any = None
    out_dir: str | Path | None = None
    resume: bool = True
    extend: bool = False
    batched: bool = True
    max_batch_size: int | None = None
    seed: int = 0
    progress: bool | None = None
    on_event: Observer | None = None
    stall_timeout: float | None = None
    """Seconds in which something must move in a worker that has work; `None` is twenty times the longest
    wait so far, at least ten minutes.
    """
    namespaced: bool = False
    """Whether ids begin with the lineup's name."""


def execute(
    runnables: Sequence[Runnable], settings: Settings, limit_of: LimitOf, places: Places
) -> RunReport:
    """Expand, run, keep and report. A run on several devices has a run folder always, if need be a temporary
    one that goes with its report.
    """
    _check(settings)
    if settings.out_dir is not None or not places.several:
        return _executed(runnables, settings, limit_of, places)
    passing = tempfile.TemporaryDirectory(prefix="interlens-run-")
    try:
        report = _executed(runnables, replace(settings, out_dir=passing.name), limit_of, places)
    except BaseException as error:
        if isinstance(error, Stopped):
            _goes_with(error.report, passing)
        else:
            passing.cleanup()
        raise
    return _goes_with(report, passing)


def _goes_with(report: RunReport, passing: "tempfile.TemporaryDirectory[str]") -> RunReport:
    """A report whose folder is nobody else's: it goes when the report does."""
    report.out_dir = None
    weakref.finalize(report.results, passing.cleanup)
    return report


def _executed(
    runnables: Sequence[Runnable], settings: Settings, limit_of: LimitOf, places: Places
) -> RunReport:
    total = _total(runnables, settings)
    manifest = None if settings.out_dir is None else manifest_of(runnables, settings, total)
    with Interrupts() as interrupts:
        return _opened(runnables, settings, limit_of, places, total, manifest, interrupts)


def _opened(
    runnables: Sequence[Runnable],
    settings: Settings,
    limit_of: LimitOf,
    places: Places,
    total: int | None,
    manifest: dict[str, Any] | None,
    interrupts: Interrupts,
) -> RunReport:
    """From opening the folder to the report; Ctrl-C leaves no folder half open."""
    store = None
    if settings.out_dir is not None and manifest is not None:
        store = RunStore(settings.out_dir, manifest, resume=settings.resume, extend=settings.extend)
    try:
        expansion = Expansion(settings.n, settings.samples, settings.seed, settings.namespaced)
        session = Session(
            runnables, expansion, store, total=total, progress=settings.progress, on_event=settings.on_event
        )
        session.tally.waits = scheduler().pool.status
        stopped = session.run(_executor(runnables, settings, limit_of, places, session), interrupts)
        if store is not None and not stopped:
            store.put_total(session.n_jobs)
            if not places.several and (used := backends.local_if_used()) is not None:
                store.put_claims(used.residents())
    finally:
        if store is not None:
            store.close()
    report = RunReport(
        session.results(),
        skipped=session.skipped,
        out_dir=settings.out_dir,
        expected=total if stopped else session.n_jobs,
    )
    if interrupts.asked:  # it may have come while the folder was closed
        on_way = pending(store.batch_journal) if store is not None and store.batch_journal else []
        left = f"; batches on their way, which the same call waits for: {', '.join(on_way)}" if on_way else ""
        raise Stopped(f"{report!r} is in this error's .report{left}", report)
    return report


def _executor(
    runnables: Sequence[Runnable],
    settings: Settings,
    limit_of: LimitOf,
    places: Places,
    session: Session,
) -> Executor:
    limit = (settings.max_batch_size or _live(runnables)) if settings.batched else 1
    if not places.several:
        [device], [name] = places.devices, places.names
        return LocalExecutor(
            [r.placed(device, 1) for r in runnables],
            session.store,
            limit=limit,
            limit_of=limit_of,
            device=name,
            count=session.tally.spend,
        )
    return PoolExecutor(
        runnables, places, session, limit=limit, limit_of=limit_of, patience=settings.stall_timeout
    )


def _live(runnables: Sequence[Runnable]) -> int:
    """How many jobs are alive at once: more than a lane is wide, so that one which is begun late and takes
    long is not the last alone; all of them where they wait for batches.
    """
    options = [dict(spec.options) for r in runnables for spec in r.models()]
    if any(o.get("batch") for o in options):
        return 1_000_000
    return max([LIVE, *(4 * int(o.get("max_concurrency", 0)) for o in options)])


def _check(settings: Settings) -> None:
    for name in ("n", "max_batch_size", "samples"):
        value = getattr(settings, name)
        if value is None and name != "samples":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is a whole number, at least 1; got {value!r}")
    if not hasattr(settings.seed, "__index__") or isinstance(settings.seed, bool):
        raise ValueError(f"seed is a whole number, got {settings.seed!r}")
    if settings.stall_timeout is not None and not settings.stall_timeout > 0:
        raise ValueError(f"stall_timeout is a number of seconds, got {settings.stall_timeout!r}")


def _total(runnables: Sequence[Runnable], settings: Settings) -> int | None:
    counts = [r.count(settings.n, settings.samples) for r in runnables]
    return None if any(c is None for c in counts) else sum(c for c in counts if c is not None)


def manifest_of(runnables: Sequence[Runnable], settings: Settings, total: int | None) -> dict[str, Any]:
    """What the run is: recipes, seeds, versions, hardware."""
    lineups = [{"name": r.name, "kind": r.kind, "describe": r.describe()} for r in runnables]
    recipe = {"lineups": lineups, "seed": settings.seed, "n": settings.n, "samples": settings.samples}
    if not settings.batched:
        recipe["batched"] = False
    return {
        "format": FORMAT,
        "recipe": recipe,
        "recipe_hash": digest_of(recipe),
        "stored": [r.to_dict() for r in runnables],
        "total": total,
        "environment": environment(any(s.kind == "huggingface" for r in runnables for s in r.models())),
    }


@functools.cache
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}


def environment(local: bool) -> dict[str, Any]:
    """What a difference in bits could come from; compared by people, not by resume."""
    out: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }
    out |= _versions()
    out["cpus"] = os.cpu_count()
    torch = sys.modules.get("torch")
    if torch is not None:
        out["threads"] = torch.get_num_threads()
    if local:
        out["attention"] = backends.local().attention_build()
    return out
