"""The only place that registers torch hooks: per-row captures over one forward pass of many rows.

`Session` is entered around a forward pass and leaves nothing behind. It works on token indices of the packed
pass: the engine says which token of which row is which.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from interlens.interp.sites import absolute, decoder_layers

if TYPE_CHECKING:
    import torch

Address = tuple[str, int]


class Session:
    """Hooks for one forward pass: for each (site, layer), the packed token indices to keep."""

    def __init__(self, model: Any, wanted: Mapping[Address, "torch.Tensor"]) -> None:
        self.model = model
        self.wanted = wanted
        self.kept: dict[Address, torch.Tensor] = {}
        """`[tokens, d]` for each address, in the order of its indices."""
        self._handles: list[Any] = []

    def __enter__(self) -> "Session":
        if self.wanted:
            layers = decoder_layers(self.model)
            modules = {(site, n): layers[absolute(site, n, len(layers))] for site, n in self.wanted}
            for address, index in self.wanted.items():
                self._handles.append(self._register(modules[address], address, index))
        return self

    def _register(self, module: Any, address: Address, index: "torch.Tensor") -> Any:
        def keep(hidden: "torch.Tensor") -> None:
            self.kept[address] = hidden.detach().reshape(-1, hidden.shape[-1])[index]

        if address[0] == "resid_pre":

            def before(_: Any, args: Any, kwargs: Any) -> None:
                keep(args[0] if args else kwargs["hidden_states"])

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(_: Any, __: Any, output: Any) -> None:
            keep(output[0] if isinstance(output, tuple | list) else output)

        return module.register_forward_hook(after)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
