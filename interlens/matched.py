"""Two recipes at equal cost: what each conversation of a pair has spent is what its solo may spend.

Rows are paired by job id, so that job i of both runs has the same row and the same seed. A row whose pair
failed or generated nothing has no budget: its solo is not run, and the table says so.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import html
from interlens.conversation import Conversation
from interlens.errors import RecipeChanged, nearest
from interlens.request import digest_of
from interlens.runner.report import RunReport
from interlens.runner.results import RunResult
from interlens.stop import Either, TokenBudget

if TYPE_CHECKING:
    import pandas

NOT_RUN = "not run"
_COLUMNS = ("job", "pair_tokens", "solo_tokens", "difference", "pair_outcome", "solo_outcome")


@dataclass(frozen=True, slots=True, repr=False)
class Matched:
    """The reports of a pair and of the solo that had its spend, and one table of both."""

    pair: RunReport
    solo: RunReport
    """A row that was not run for want of a budget is a failure here, with no tokens and a reason."""

    def frame(self) -> "pandas.DataFrame":
        """One row per job: tokens of both, solo minus pair, outcomes of both.

        A job whose solo was not run has the `solo_outcome` "not run", and neither tokens nor a difference.
        """
        import pandas

        table = pandas.DataFrame(self._lines(), columns=list(_COLUMNS))
        return table.astype(dict.fromkeys(_COLUMNS[1:4], "Int64"))

    def _lines(self) -> Iterator[tuple[str, int, int | None, int | None, str, str]]:
        for job, pair in self.pair.results.items():
            spent, solo = pair.tokens_generated, self.solo.results.get(job)
            if solo is None or not _spend(pair):
                yield job, spent, None, None, pair.outcome, NOT_RUN
                continue
            tokens = solo.tokens_generated
            yield job, spent, tokens, tokens - spent, pair.outcome, solo.outcome

    def __repr__(self) -> str:
        lines = list(self._lines())
        run = [(job, spent, tokens, off) for job, spent, tokens, off, *_ in lines if off is not None]
        parts = [f"{len(run)} solos run"]
        without = sum(not _spend(result) for result in self.pair.results.values())
        if without:
            parts.append(f"{without} {NOT_RUN} (the pair failed or spent nothing)")
        if left := len(lines) - len(run) - without:
            parts.append(f"{left} {NOT_RUN} yet")
        if failed := sum(line[-1] == "failed" for line in lines):
            parts.append(f"{failed} failed")
        pair, solo = (sum(int(line[i] or 0) for line in run) for i in (1, 2))
        job, off = max(((line[0], line[3]) for line in run), key=lambda x: abs(x[1] or 0), default=("", 0))
        largest = f"largest difference {off:+d} in {job}" if off else "no difference"
        return f"Matched({len(lines)} jobs: {', '.join(parts)}; pair {pair} tokens, solo {solo}, {largest})"

    def _repr_html_(self) -> str:
        lines = list(self._lines())
        rows = (["—" if cell is None else cell for cell in line] for line in lines[:20])
        parts = [html.tag("b", repr(self)), html.table(rows, _COLUMNS)]
        if len(lines) > 20:
            parts.append(html.tag("p", f"… {len(lines) - 20} more jobs"))
        return html.tag("div", *parts)


def matched_compute(
    pair: Conversation,
    solo: Conversation,
    *,
    out_dir: str | Path | None = None,
    per_turn: int | None = None,
    **options: Any,
) -> Matched:
    """Roll out a pair, then a solo with the tokens that the pair has spent, row by row.

    `matched_compute(pair.turns(4), solo, n=64, out_dir="runs/x").frame()`

    `per_turn` caps each turn of the solo, in tokens. The solo's own `turns` and `run_until` hold too, and may
    end it earlier. Spend is `tokens_generated`: the whole transcript, with denied and inherited turns. The
    runs are kept in `out_dir/pair` and `out_dir/solo`, and the same call goes on with both. The other options
    are those of `rollout`, for both runs; events of the pair come first. Both recipes need the same data, or
    none: a row that differs is a `ValueError`. An `out_dir` whose solo had other budgets is a
    `RecipeChanged`.
    """
    known = sorted(set(inspect.signature(Conversation.rollout).parameters) - {"self"})
    for name in options:
        if name not in known:
            raise TypeError(f"matched_compute() takes no {name!r}: {nearest(name, [*known, 'per_turn'])}")
    budget = TokenBudget(per_conversation={}, per_turn=per_turn)
    _check(pair, solo)
    folders = [Path(out_dir) / name if out_dir is not None else None for name in ("pair", "solo")]
    spent = pair.rollout(out_dir=folders[0], **options)
    amounts = {job: result.tokens_generated for job, result in spent.results.items() if _spend(result)}
    budget = replace(budget, per_conversation=amounts)
    own = solo.recipe.run_until
    bounded = solo.run_until(budget if own is None else Either(own, budget))
    try:
        matched = Matched(spent, bounded.rollout(out_dir=folders[1], **options))
    except RecipeChanged as error:
        if ".per_conversation." not in str(error):
            raise
        raise RecipeChanged(
            f"the solo run in {folders[1]} had other budgets than the pair's spend is now: the pair was "
            f"extended, or a row of it that had failed was run again. Remove that folder and call again: the "
            f"pair is read back, the solo runs anew"
        ) from error
    _check_rows(matched)
    return matched


def _spend(result: RunResult) -> int:
    """What a pair gives its solo, in tokens; 0 is no budget: it failed, or nothing was generated."""
    return 0 if result.outcome == "failed" else result.tokens_generated


def _check(pair: Any, solo: Any) -> None:
    """Refuse before anything runs what cannot be paired."""
    for name, conv in (("pair", pair), ("solo", solo)):
        if not isinstance(conv, Conversation):
            raise TypeError(f"matched_compute(pair, solo) takes two conversations; {name} is {conv!r:.80}")
        conv.recipe.refuse_people()
    rows = {"pair": pair.recipe.data, "solo": solo.recipe.data}
    without = [name for name, data in rows.items() if data is None]
    if len(without) == 1:
        raise ValueError(f"the {without[0]} has no data and the other has: .data(rows) gives both the same")
    if rows["pair"] is rows["solo"] and hasattr(rows["pair"], "__next__"):
        raise ValueError(
            f"the data is an iterator ({type(rows['pair']).__name__}): the pair would use it up and leave "
            f"nothing for the solo; give both a list or a data set"
        )
    one, two = (len(data) if hasattr(data, "__len__") else None for data in rows.values())
    if one is not None and two is not None and one != two:
        raise ValueError(
            f"the pair has {one} rows of data and the solo {two}; rows are paired by their number: give both "
            f"the same data"
        )


def _check_rows(matched: Matched) -> None:
    """Refuse two runs that were not over the same rows."""
    pair, solo = matched.pair.results, matched.solo.results
    if set(pair) != set(solo):
        job = min(set(pair) ^ set(solo))
        only = "pair" if job in pair else "solo"
        raise ValueError(
            f"{job} is in the {only}'s run only: its data has more rows; give both the same data"
        )
    for job, result in pair.items():
        one, two = result.row, solo[job].row
        if digest_of(one) != digest_of(two):
            names = [k for k in {**one, **two} if digest_of(one.get(k)) != digest_of(two.get(k))]
            raise ValueError(
                f"{job} is another row in the solo's run than in the pair's: {', '.join(names)} differs; "
                f"give both the same data"
            )
