"""Jobs that wait for a worker: at most one of each lineup is pulled ahead, so that data is never piled up.

A worker is given a job whose models it has already, where there is one.
"""

from collections import deque
from collections.abc import Collection, Sequence

from interlens.request import BackendSpec
from interlens.runner.executor import Source, Work

Models = Collection[BackendSpec]


class Waiting:
    """The lineups of a run, each pulled when a job of it is wanted, and jobs that came back."""

    def __init__(self, sources: Sequence[Source], models: Sequence[frozenset[BackendSpec]]) -> None:
        self._sources, self._models = dict(enumerate(sources)), models
        self._ahead: dict[int, Work] = {}
        self._back: deque[Work] = deque()
        self._told: set[int] = set()

    def back(self, work: Work) -> None:
        """Take back a job that had not begun: it is the next to be given."""
        self._back.appendleft(work)

    def empty(self) -> bool:
        """Whether no job waits and none can be pulled."""
        return not self._back and not any(self._peek(lineup) for lineup in list(self._sources))

    def next_for(self, has: Models, others: Sequence[Models]) -> Work | None:
        """The job that a worker with these models should run next; `None` if there is none.

        First where it has all models, then where the fewest others have what it lacks, then in order.
        """
        if self._back:
            return self._back.popleft()
        open_ = [lineup for lineup in list(self._sources) if self._peek(lineup)]
        if not open_:
            return None

        def cost(lineup: int) -> tuple[int, int, int]:
            needs = self._models[lineup]
            lacks = needs.difference(has)
            return len(lacks), sum(needs <= set(other) for other in others) if lacks else 0, lineup

        return self._ahead.pop(min(open_, key=cost))

    def _peek(self, lineup: int) -> bool:
        if lineup not in self._ahead:
            work = next(self._sources[lineup], None)
            if work is None:
                del self._sources[lineup]
                return False
            self._ahead[lineup] = work
        return True

    def newly_over(self, held: set[int]) -> list[int]:
        """Lineups none of whose jobs waits, or is held somewhere; each is told once."""
        busy = held | set(self._sources) | {work.attempt.job.lineup for work in self._back}
        over = [lineup for lineup in range(len(self._models)) if lineup not in busy | self._told]
        self._told.update(over)
        return over

    def needed(self) -> set[BackendSpec]:
        """The models of the lineups that are not over."""
        return {
            spec for lineup, needs in enumerate(self._models) if lineup not in self._told for spec in needs
        }
