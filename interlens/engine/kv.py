"""Keys, values and states of the live rows: the cache that a Hugging Face model calls in a packed pass.

`Slots` carries what the pass is about (its segments and its plan), so that no module global is needed. Each
layer's buffers are made from the shapes that the layer hands over, never from a config: heads may differ by
layer, latents may stand for keys. Recurrent layers keep one state per row, in transformers' own cache.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache

from interlens.engine.kernel import MAX_WIDTH, TILE, Kernel

PAD = 64
"""Keys are padded to a multiple of this, so that sums over them keep their order (see `attention`)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some tokens of one row inside a packed pass: `n` from `start` on, `past` positions before them."""

    slot: int
    past: int
    start: int
    n: int


@dataclass(slots=True)
class Layer:
    """One layer's buffers: values `[slots, kv heads, length, d]`, keys likewise or in tiles of 16
    positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tiled: bool

    def reach(self, n: int) -> int:
        """How far the first `n` positions reach in the keys: positions, or tiles of them."""
        return -(-n // TILE) if self.tiled else n


class Mark(NamedTuple):
    """Put on the keys that `update` hands back, so that attention knows where to read."""

    slots: "Slots"
    layer: int
    value: torch.Tensor


@dataclass(slots=True)
class Kept:
    """A row's keys, values and states outside its slot."""

    layers: dict[int, Layer] = field(default_factory=dict)
    state: DynamicCache | None = None

    @property
    def bytes(self) -> int:
        """Memory held."""
        tensors = [t for layer in self.layers.values() for t in (layer.keys, layer.values)]
        return sum(t.numel() * t.element_size() for t in [*tensors, *states_of(self.state)])


def states_of(cache: DynamicCache | None) -> list[torch.Tensor]:
    """The recurrent and convolution states of one row."""
    found: list[torch.Tensor] = []
    for layer in cache.layers if cache is not None else ():
        for kind in ("conv_states", "recurrent_states"):
            found += [t for t in getattr(layer, kind, {}).values() if t is not None]
    return found


class Slots(Cache):
    """Room for live rows, grown as needed; a model's layers call `update` and attention reads the buffers."""

    is_compileable = False

    def __init__(
        self, config: Any, kernel: Kernel | None = None, sights: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(layers=[])
        self.config = config
        self.sights = sights or {}
        """Window and chunk of each layer that has one, where its module does not say."""
        self.kernel = kernel
        """Computes attention where it can, and wants keys in tiles of 16 positions; `None` is plain torch."""
        self.stores: dict[int, Layer] = {}
        self.states: dict[int, DynamicCache] = {}
        self.n_slots = 0
        self.length = 0
        self.plan: Any = None
        """What `attention` works out once for a pass."""
        self.asked: dict[int, tuple[float, Any, bool]] = {}
        """By layer: scale and sight that its module asked of attention, and whether it told its window."""
        self.patterns: Mapping[int, list[tuple[int, int, int]]] = {}
        """By layer, the queries whose attention somebody wants to see: token, slot, position."""
        self.patterned: dict[int, list[torch.Tensor]] = {}
        """By layer, their attention, `[heads, keys]` each."""
        self._work: torch.Tensor | None = None
        self.unread: set[int] = set()
        """Layers that stored keys in this pass which attention has not read yet."""

    def begin(self, plan: Any, patterns: Mapping[int, list[tuple[int, int, int]]] | None = None) -> None:
        """Start a pass; rows that start in it start without a state."""
        self.plan, self.patterns = plan, patterns or {}
        self.unread.clear()
        self.patterned.clear()
        for s in plan.segments:
            if s.past == 0:
                self.states.pop(s.slot, None)

    # -- what a model asks of its cache; positions are always given explicitly

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * int(self.config.get_text_config(decoder=True).num_hidden_layers)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0; a layer that asks for itself gets `[T]`, what makes positions come out right token by token."""
        return 0 if layer_idx is None or self.plan is None else self.plan.offsets

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, `[1, heads, tokens, d]`, and hand them back: attention reads the
        buffers.
        """
        key, value = key_states, value_states
        store = self.store(layer_idx, key, value)
        key._interlens = Mark(self, layer_idx, value)  # type: ignore[attr-defined]
        self.unread.add(layer_idx)
        if store.tiled:
            assert self.kernel is not None
            self.kernel.store(key[0], value[0], store.keys, store.values, self.plan.tasks)
            return key, value
        decode = self.plan.decode
        if decode is not None:
            where = decode.where(key.device)
            store.keys[where.slots, :, where.positions] = key[0, :, : decode.n].transpose(0, 1)
            store.values[where.slots, :, where.positions] = value[0, :, : decode.n].transpose(0, 1)
        for s in self.plan.prefill:
            store.keys[s.slot, :, s.past : s.past + s.n] = key[0, :, s.start : s.start + s.n]
            store.values[s.slot, :, s.past : s.past + s.n] = value[0, :, s.start : s.start + s.n]
        return key, value

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Layer:
        """A layer's buffers; made from the shapes of the first keys and values, `[…, heads, tokens, d]`."""
        if layer not in self.stores:
            self.stores[layer] = self._allocate(key, value, self._tiles(key, value))
        return self.stores[layer]

    def work(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the numbers of one layer on their way; the next layer takes the same."""
        if self._work is None or len(self._work) < n or self._work.dtype != dtype:
            self._work = torch.empty(n, dtype=dtype)
        return self._work

    # -- states of recurrent layers

    def state(self, slot: int) -> DynamicCache:
        """The states of a row, of all its layers."""
        if slot not in self.states:
            self.states[slot] = DynamicCache(config=self.config)
        return self.states[slot]

    # -- room

    def _tiles(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        width = key.shape[-1]
        fits = key.shape == value.shape and width % TILE == 0 and width <= MAX_WIDTH
        return self.kernel is not None and fits and key.device.type == "cpu"

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, tiled: bool) -> Layer:
        """Make buffers for keys and values shaped like these: `[…, heads, positions, d]`."""
        heads, width = key.shape[-3], key.shape[-1]
        shape = (
            (self.n_slots, heads, self.length // TILE, width, TILE)
            if tiled
            else (self.n_slots, heads, self.length, width)
        )
        values = (self.n_slots, value.shape[-3], self.length, value.shape[-1])
        # the kernel reads what was written only; plain torch multiplies all there is, by zero
        make = torch.Tensor.new_empty if tiled else torch.Tensor.new_zeros
        return Layer(make(key, shape), make(value, values), tiled)

    def fit(self, n_slots: int, length: int) -> None:
        """Make room, with some to grow into; shrink when the longest row has become much shorter."""
        wanted = max(PAD, -(-length // PAD) * PAD)
        slots = self.n_slots
        while slots < n_slots:
            slots = max(4, 2 * slots)
        if wanted <= self.length <= wanted + 4 * PAD and slots == self.n_slots:
            return
        rows, short = min(slots, self.n_slots), min(self.length, wanted + 2 * PAD)
        self.n_slots, self.length = slots, wanted + 2 * PAD
        for index, old in self.stores.items():
            like = old.keys.transpose(-1, -2).flatten(-3, -2) if old.tiled else old.keys
            new = self.stores[index] = self._allocate(like[:0], old.values[:0], old.tiled)
            new.keys[:rows, :, : old.reach(short)] = old.keys[:rows, :, : old.reach(short)]
            new.values[:rows, :, :short] = old.values[:rows, :, :short]

    # -- rows in and out

    def copy(self, source: int, target: int, n: int) -> None:
        """Copy the first `n` positions of one slot into another."""
        for layer in self.stores.values():
            reach = layer.reach(n)
            layer.keys[target, :, :reach] = layer.keys[source, :, :reach]
            layer.values[target, :, :n] = layer.values[source, :, :n]
        self.states.pop(target, None)
        if source in self.states:
            self.states[target] = copy.deepcopy(self.states[source])

    def take(self, slot: int, n: int) -> Kept:
        """The first `n` positions of a slot, as tensors of their own."""
        kept = Kept(state=self.states.pop(slot, None))
        for index, layer in self.stores.items():
            keys = layer.keys[slot, :, : layer.reach(n)].clone()
            kept.layers[index] = Layer(keys, layer.values[slot, :, :n].clone(), layer.tiled)
        return kept

    def put(self, slot: int, kept: Kept, n: int) -> None:
        """Write the first `n` positions of a parked row into a slot."""
        for index, old in kept.layers.items():
            layer = self.stores.get(index)
            if layer is None:
                like = old.keys.transpose(-1, -2).flatten(-3, -2) if old.tiled else old.keys
                layer = self.stores[index] = self._allocate(like, old.values, old.tiled)
            reach = layer.reach(n)
            layer.keys[slot, :, :reach] = old.keys[:, :reach]
            layer.values[slot, :, :n] = old.values[:, :n]
        self.states.pop(slot, None)
        if kept.state is not None:
            self.states[slot] = copy.deepcopy(kept.state)

    def wipe(self, slot: int) -> None:
        """Zero a slot whose row went bad, so that what it held cannot reach the next one."""
        for layer in self.stores.values():
            layer.keys[slot] = 0
            layer.values[slot] = 0
        self.states.pop(slot, None)

    @property
    def bytes(self) -> int:
        """Memory held by the slots."""
        tensors = [t for layer in self.stores.values() for t in (layer.keys, layer.values)]
        tensors += [t for state in self.states.values() for t in states_of(state)]
        return sum(t.numel() * t.element_size() for t in tensors)
