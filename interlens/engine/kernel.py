"""The C kernel's functions, with their arguments checked: attention, rotary embeddings, linear layers, norms,
gates, draws and digests of one fixed order of operations. `compiled` builds and tries it.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TILE = 16
SHARE = 16
"""Tokens of one segment that are computed together."""
MAX_QUERIES, MAX_WIDTH = 12, 256
TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Sight:
    """What a layer's queries see and how their scores are made; the same for every pass."""

    window: int = 0
    """Positions seen, the query's own included; 0 is all."""
    chunk: int = 0
    """Only keys of the same chunk of this many positions are seen; 0 is all."""
    cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0 changes nothing."""
    sinks: torch.Tensor | None = None
    """[Hq], a score per head that takes part in the softmax and has no value."""
    slopes: torch.Tensor | None = None
    """[Hq], alibi: slope * (key position - query position) is added to a score."""

    def hides(self, key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Which keys a query does not see, by their positions."""
        hidden = key > query
        if self.window:
            hidden = hidden | (key <= query - self.window)
        if self.chunk:
            hidden = hidden | (key // self.chunk != query // self.chunk)
        return hidden


@dataclass(frozen=True, slots=True)
class Tasks:
    """The queries of a pass: for each task, `count` tokens of one slot from token `begin` on; int32
    `[tasks]`.
    """

    begin: torch.Tensor
    count: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    """Position of the task's first token."""
    longest: int
    """The largest number of keys that any of them sees."""
    tokens: int
    """Tokens in the pass."""
    slots: int
    """One more than the last slot."""
    pointers: tuple[int, ...]
    """The number of tasks and where the four arrays lie."""


def tasks_of(items: Iterable[tuple[int, int, int, int]]) -> Tasks:
    """From (begin, count, slot, position) of each segment; long ones are cut, so that threads share them."""
    cut = [
        (begin + i, min(SHARE, count - i), slot, position + i)
        for begin, count, slot, position in items
        for i in range(0, count, SHARE)
    ]
    arrays = [torch.tensor(c, dtype=torch.int32) for c in zip(*cut, strict=True)]
    begin, count, slot, position = arrays
    return Tasks(
        begin=begin,
        count=count,
        slot=slot,
        position=position,
        longest=max(at + n for _, n, _, at in cut),
        tokens=sum(n for _, n, _, _ in cut),
        slots=1 + max(s for _, _, s, _ in cut),
        pointers=(len(cut), *(a.data_ptr() for a in arrays)),
    )


class Block(ctypes.Structure):
    """A decoder layer for the kernel, as `decoder.c` lays it out."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in ("width", "inner", "queries", "heads", "head", "window", "chunk")
        ],
        *[(name, ctypes.c_float) for name in ("scale", "eps", "after_eps", "query_eps", "key_eps")],
        *[(name, ctypes.c_void_p) for name in ("norm", "after", "query_norm", "key_norm")],
        ("panels", ctypes.c_void_p * 7),
        ("bias", ctypes.c_void_p * 7),
    )

    @property
    def work(self) -> int:
        """Numbers that the kernel keeps per token on the way."""
        return 2 * (self.width + self.inner + (self.queries + self.heads) * self.head)


class Kernel:
    """The built library, with its arguments checked."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form = path, form
        self.build = path.stem
        library = ctypes.CDLL(str(path))
        self._store = {t: _bound(library, f"store_{name}", _STORE) for t, name in TYPES.items()}
        self._rotate = {t: _bound(library, f"rotate_{name}", _ROTATE) for t, name in TYPES.items()}
        self._attend = {t: _bound(library, f"attend_{name}", _ATTEND) for t, name in TYPES.items()}
        self._layer = {t: _bound(library, f"layer_{name}", _LAYER) for t, name in TYPES.items()}
        self._norm = {t: _bound(library, f"norm_{name}", _NORM) for t, name in TYPES.items()}
        self._silu = {
            t: _bound(library, f"silu_{name}", [_LONG, *[_POINTER] * 3]) for t, name in TYPES.items()
        }
        self._draw = _bound(library, "draw", _DRAW)
        self._digest = _bound(library, "digest", [_POINTER, _LONG, _POINTER])
        self._linear = {torch.float32: _bound(library, "linear_f32", _LINEAR)}
        if library.matrix_units():
            self._linear[torch.bfloat16] = _bound(library, "linear_bf16", _LINEAR)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kernel":
        return self

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tasks: Tasks,
    ) -> None:
        """Write keys and values `[H, T, d]` into tiles `[slots, H, L/16, d, 16]` and `[slots, H, L, d]`."""
        heads, n, width = key.shape
        if key.stride() != value.stride() or key.stride(2) != 1:
            key, value = key.contiguous(), value.contiguous()
        assert tasks.tokens == n
        assert tasks.longest <= values.shape[2]
        assert tasks.slots <= values.shape[0]
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self._store[key.dtype](
            *tasks.pointers,
            heads,
            width,
            key.data_ptr(),
            value.data_ptr(),
            key.stride(1),
            key.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
        )

    def rotate(
        self,
        projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        tasks: Tasks,
    ) -> torch.Tensor:
        """Queries `[T, Hq * d]`, keys and values `[T, H * d]`, contiguous, before the rotary embedding:
        cosines and sines `[T, r]` turn the first r numbers of each head, keys and values go into their tiles,
        and the queries come back as `[Hq, T, d]`.
        """
        query, key, value = projected
        cosine, sine = (t.contiguous() for t in rotary)
        slots, heads, length, width = values.shape
        n, turned = cosine.shape
        all_heads = query.shape[-1] // width
        assert query.shape == (n, all_heads * width)
        assert key.shape == value.shape == (n, heads * width)
        assert all(t.is_contiguous() and t.dtype == keys.dtype for t in (*projected, cosine, sine))
        assert turned <= width
        assert turned % 2 == 0
        assert tasks.tokens == n
        assert tasks.longest <= length
        assert tasks.slots <= slots
        out = torch.empty_like(query)
        self._rotate[keys.dtype](
            *tasks.pointers,
            all_heads,
            heads,
            width,
            turned,
            *(t.data_ptr() for t in (query, key, value, cosine, sine, out, keys, values)),
            values.stride(0),
            values.stride(1),
        )
        return out.view(n, all_heads, width).transpose(0, 1)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tasks: Tasks,
        *,
        scale: float,
        sight: Sight = Sight(),
    ) -> torch.Tensor:
        """Queries `[Hq, T, d]` against their slots: `[T, Hq, d]`."""
        all_heads, n, width = query.shape
        slots, heads, length = values.shape[:3]
        if query.stride(2) != 1:
            query = query.contiguous()
        assert all_heads % heads == 0
        assert tasks.tokens == n
        assert tasks.longest <= length
        assert tasks.slots <= slots
        out = query.new_empty(n, all_heads, width)
        threads = torch.get_num_threads()
        stride = -(-tasks.longest // TILE) * TILE
        scratch = torch.empty(threads * MAX_QUERIES * stride)  # per call: models may run in several threads
        sinks, slopes = _per_head(sight.sinks, all_heads), _per_head(sight.slopes, all_heads)
        self._attend[query.dtype](
            *tasks.pointers,
            heads,
            all_heads // heads,
            width,
            scale,
            sight.window,
            sight.chunk,
            sight.cap,
            sinks.data_ptr() if sinks is not None else None,
            slopes.data_ptr() if slopes is not None else None,
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            out.data_ptr(),
            out.stride(0),
            scratch.data_ptr(),
            stride,
            threads,
        )
        return out

    def layer(
        self,
        block: Block,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        tasks: Tasks,
        work: torch.Tensor,
    ) -> torch.Tensor:
        """A whole decoder layer of `x` `[T, width]`; `work` has room for `block.work` numbers per token."""
        n, width = x.shape
        turned = rotary[0].shape[1]
        assert width == block.width
        assert tasks.tokens == n
        assert tasks.longest <= values.shape[2]
        assert tasks.slots <= values.shape[0]
        assert values.shape[1] == block.heads
        assert values.shape[3] == block.head >= turned
        assert work.numel() >= n * block.work
        assert x.dtype == keys.dtype == work.dtype == rotary[0].dtype == rotary[1].dtype
        assert x.is_contiguous()
        assert rotary[0].is_contiguous()
        assert rotary[1].is_contiguous()
        threads = torch.get_num_threads()
        stride = -(-tasks.longest // TILE) * TILE
        scratch, out = torch.empty(threads * MAX_QUERIES * stride), torch.empty_like(x)
        self._layer[x.dtype](
            ctypes.addressof(block),
            *tasks.pointers,
            n,
            turned,
            x.data_ptr(),
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            values.stride(0),
            values.stride(1),
            out.data_ptr(),
            work.data_ptr(),
            scratch.data_ptr(),
            stride,
            threads,
        )
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of `x` `[…, d]` with weights `[d]`, d a multiple of 16; both of one type."""
        width = x.shape[-1]
        x = x if x.is_contiguous() else x.contiguous()
        assert weight.shape == (width,)
        assert width % TILE == 0
        assert x.dtype == weight.dtype
        weight = weight if weight.is_contiguous() else weight.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        self._norm[x.dtype](rows, width, eps, x.data_ptr(), width, weight.data_ptr(), out.data_ptr())
        return out

    def silu(self, x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
        """x / (1 + exp(-x)), element by element, and times `by`."""
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty_like(x)
        if by is not None:
            assert (by.shape, by.dtype) == (x.shape, x.dtype)
            by = by if by.is_contiguous() else by.contiguous()
        self._silu[x.dtype](x.numel(), x.data_ptr(), None if by is None else by.data_ptr(), out.data_ptr())
        return out

    def digest(self, words: torch.Tensor) -> int:
        """A number that tells the words of a contiguous int64 tensor and their places."""
        assert words.dtype == torch.int64
        assert words.is_contiguous()
        out = (ctypes.c_uint64 * 2)()
        self._digest(words.data_ptr(), words.numel(), ctypes.addressof(out))
        return out[0] ^ (out[1] << 64)

    def multiplies(self, weight: torch.Tensor) -> bool:
        """Whether linear layers with such a weight `[out, in]` are computed here."""
        return weight.dtype in self._linear and (weight.dtype == torch.float32 or weight.shape[1] % 32 == 0)

    def linear(
        self, x: torch.Tensor, panels: torch.Tensor, size: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x` `[…, in]` times a weight `[size, in]` that `panels_of` laid out: `[…, size]`."""
        dtype, width = x.dtype, x.shape[-1]
        columns = _COLUMNS[dtype]
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], size), dtype=dtype)
        assert dtype == panels.dtype
        assert panels.numel() == (size + columns - 1) // columns * columns * width
        if bias is not None:
            assert len(bias) == size
            if bias.dtype != dtype or not bias.is_contiguous():
                bias = bias.detach().to(dtype).contiguous()
        self._linear[dtype](
            x.numel() // width,
            size,
            width,
            x.data_ptr(),
            width,
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def draw(self, logits_BV: torch.Tensor, heat: Sequence[float], u: Sequence[float]) -> list[int]:
        """By inverse CDF, the token of each row's distribution softmax(logits / heat) at `u` in [0, 1)."""
        logits_BV = logits_BV.contiguous()
        assert logits_BV.dtype == torch.float32
        n, size = logits_BV.shape
        heats, at = torch.tensor(heat, dtype=torch.float32), torch.tensor(u, dtype=torch.float64)
        assert len(heats) == len(at) == n
        sums = torch.empty(size // 512 + 1, dtype=torch.float64)
        tokens = torch.empty(n, dtype=torch.int32)
        self._draw(n, size, *(t.data_ptr() for t in (logits_BV, heats, at, sums, tokens)))
        return tokens.tolist()  # type: ignore[no-any-return]


_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_TASKS = [_INT, *[_POINTER] * 4]
_STORE = [*_TASKS, _INT, _INT, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG]
_ROTATE = [*_TASKS, *[_INT] * 4, *[_POINTER] * 8, _LONG, _LONG]
_ATTEND = [
    *_TASKS,
    *[_INT] * 3,
    *[_FLOAT, _INT, _INT, _FLOAT, _POINTER, _POINTER],
    *[_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _INT, _INT],
]

_LAYER = [_POINTER, *_TASKS, _INT, _INT, *[_POINTER] * 5, _LONG, _LONG, *[_POINTER] * 3, _INT, _INT]
_NORM = [_INT, _INT, _FLOAT, _POINTER, _LONG, _POINTER, _POINTER]
_LINEAR = [_INT, _INT, _INT, _POINTER, _LONG, *[_POINTER] * 3, _INT]
_COLUMNS = {torch.float32: 48, torch.bfloat16: 32}
_DRAW = [_INT, _INT, *[_POINTER] * 5]


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out, in]` as the kernel reads it: panels of columns, for bf16 in pairs along `in` too."""
    size, width = weight.shape
    columns = _COLUMNS[weight.dtype]
    more = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -size % columns))
    if weight.dtype == torch.float32:
        return more.view(-1, columns, width).transpose(1, 2).contiguous()
    return more.view(-1, 2, 16, width // 32, 16, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


def _bound(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = library[name]
    function.argtypes, function.restype = arguments, None
    return function


def _per_head(numbers: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    if numbers is None:
        return None
    numbers = numbers.detach().float().reshape(-1).contiguous()
    assert len(numbers) == heads
    return numbers
