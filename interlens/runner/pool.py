"""Which backends are resident in this process: loaded once per spec, shared by all that name it, freed on
request.
"""

from collections.abc import Callable
from typing import Any

from interlens import backends
from interlens.errors import LoadError
from interlens.request import Backend, BackendSpec


class BackendPool:
    """From a spec to the resident backend. Used by the scheduler's thread only."""

    def __init__(self, in_flight: Callable[[Backend], int]) -> None:
        self.in_flight = in_flight
        """How many requests a backend is answering."""
        self._resident: dict[BackendSpec, Backend] = {}
        self.loading: str | None = None
        """The model whose weights are being loaded now."""

    def get(self, which: BackendSpec | Backend) -> Backend:
        """The backend that answers; a spec is loaded at first use."""
        if not isinstance(which, BackendSpec):
            return which
        if which not in self._resident:
            self._resident[which] = self._load(which)
        return self._resident[which]

    def settle(self) -> None:
        """Let backends write down what has been delivered; for the end of a run."""
        for backend in self._resident.values():
            if (settle := getattr(backend, "settle", None)) is not None:
                settle()

    def status(self) -> str:
        """What backends have to tell the one who waits; may be asked by any thread."""
        told = (getattr(backend, "status", "") for backend in list(self._resident.values()))
        return ", ".join(part for part in told if part)

    def peek(self, which: BackendSpec) -> Backend | None:
        """The backend if it is resident."""
        return self._resident.get(which)

    def _load(self, spec: BackendSpec) -> Backend:
        if not spec.is_local:
            return backends.hosted(spec)
        self.loading = spec.model
        try:
            return backends.loaded(spec)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{spec.model} did not load: {error}") from error
        finally:
            self.loading = None

    def resident(self) -> list[BackendSpec]:
        """The specs of the backends that are resident."""
        return list(self._resident)

    def unload(self, which: BackendSpec | None = None) -> list[str]:
        """Free one backend, or all; return the names of those freed."""
        specs = [s for s in self._resident if which is None or s == which]
        for spec in specs:
            if n := self.in_flight(self._resident[spec]):
                name = self._resident[spec].name
                raise RuntimeError(f"{name} cannot be freed: it answers {n} requests; let them end first")
        freed = []
        for spec in specs:
            backend = self._resident.pop(spec)
            backend.close()
            freed.append(backend.name)
        return freed

    def __repr__(self) -> str:
        names: list[Any] = [b.name for b in self._resident.values()]
        return f"BackendPool({', '.join(names) or 'empty'})"
