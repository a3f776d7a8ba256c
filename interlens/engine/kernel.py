"""The C kernel for exact attention, norms and draws: built once into the user's cache by the system compiler,
tried before it is used.

`kernels/` holds the sources; the library's name is a hash of them, of the compiler and of the flags, so a
changed source or another processor builds another one. Without a compiler, without AVX2, or with
`INTERLENS_KERNEL=0`, plain torch does the same work. The two differ from each other in bits; each is exact in
itself.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from interlens.engine.load import cache_dir

log = logging.getLogger("interlens.engine")
FOLDER = Path(__file__).with_name("kernels")
SOURCES = ("attention.c", "layers.c")
TILE = 16
SHARE = 16
"""Tokens of one segment that are computed together."""
MAX_QUERIES, MAX_WIDTH = 12, 256
FORMS = {
    "amx": (
        "avx512f avx512bw avx512vl avx512dq fma amx_tile amx_bf16",
        ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mamx-tile", "-mamx-bf16"],
    ),
    "avx512": (
        "avx512f avx512bw avx512vl avx512dq fma",
        ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    ),
    "avx2": ("avx2 fma", ["-mavx2", "-mfma"]),
}
"""Name of a form to the processor flags it needs and the compiler flags it is built with."""
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


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


class Kernel:
    """The built library, with its arguments checked."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form = path, form
        self.build = path.stem
        library = ctypes.CDLL(str(path))
        self._store = {t: _bound(library, f"store_{name}", _STORE) for t, name in _NAMES.items()}
        self._attend = {t: _bound(library, f"attend_{name}", _ATTEND) for t, name in _NAMES.items()}
        self._norm = {t: _bound(library, f"norm_{name}", _NORM) for t, name in _NAMES.items()}
        self._silu = {
            t: _bound(library, f"silu_{name}", [_LONG, *[_POINTER] * 3]) for t, name in _NAMES.items()
        }
        self._draw = _bound(library, "draw", _DRAW)
        self._digest = _bound(library, "digest", [_POINTER, _LONG, _POINTER])
        self._linear = {torch.float32: _bound(library, "linear_f32", _LINEAR)}
        if library.matrix_units():
            self._linear[torch.bfloat16] = _bound(library, "linear_bf16", _LINEAR)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kernel":
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return kernel, ()

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
_ATTEND = [
    *_TASKS,
    *[_INT] * 3,
    *[_FLOAT, _INT, _INT, _FLOAT, _POINTER, _POINTER],
    *[_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _INT, _INT],
]

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


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The kernel, built if need be and tried; `None` where plain torch is to do the work."""
    if os.environ.get("INTERLENS_KERNEL", "1") == "0":
        return None
    forms = [name for name, (needs, _) in FORMS.items() if set(needs.split()) <= processor_flags()]
    compiler = next((path for c in ("cc", "gcc", "clang") if (path := shutil.which(c))), None)
    if not forms or compiler is None:
        log.info("no kernel: %s", "no compiler was found" if compiler is None else "no AVX2")
        return None
    for form in forms:
        try:
            built = Kernel(build(compiler, form), form)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("the kernel's %s form could not be built: %s", form, error)
            continue
        if tried(built):
            return built
        log.warning("the kernel's %s form failed its self-test on this machine", form)
    log.warning("plain torch is used instead of the kernel")
    return None


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel, if it can compute this type there."""
    return kernel() if device.type == "cpu" and dtype in _NAMES else None


def processor_flags() -> set[str]:
    """What the processor can do, as Linux tells it; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((row for row in text.split("\n") if row.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def build(compiler: str, form: str) -> Path:
    """Compile into the cache under a name that says what from; an existing one is used."""
    runtime = _openmp()
    flags = ["-O3", "-ffp-contract=fast", "-fPIC", *FORMS[form][1], *(["-fopenmp"] if runtime else [])]
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".c", ".h")]
    mark = hashlib.sha256(repr((texts, version, flags, runtime)).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"kernel-{form}-{mark}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / "kernel.so"
        objects = [str(Path(work) / f"{name}.o") for name in SOURCES]
        commands = [
            [compiler, *flags, "-c", str(FOLDER / name), "-o", thing]
            for name, thing in zip(SOURCES, objects, strict=True)
        ]
        link = [compiler, "-shared", *objects, *([runtime] if runtime else []), "-lm", "-o", str(made)]
        for command in (*commands, link):
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip()[-500:])
        made.replace(target)
    return target


def _openmp() -> str | None:
    """The OpenMP runtime that torch itself runs on: one team of threads, not two."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else None


def tried(built: Kernel) -> bool:
    """Against plain torch, and against itself with other queries beside: all that a `Sight` can say too."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads, group, length, width, n, past = 2, 3, 96, 32, 21, 60
    sights = (
        Sight(),
        Sight(window=17, cap=5.0, sinks=random(heads * group)),
        Sight(chunk=19, slopes=-random(heads * group).abs()),
    )
    for dtype in _NAMES:
        k, v, q = (
            random(*s).to(dtype)
            for s in ((2, heads, length, width), (2, heads, length, width), (6, n, width))
        )
        tiles = k.reshape(2, heads, length // TILE, TILE, width).transpose(-1, -2).contiguous()
        for sight in sights:
            many = built.attend(q, tiles, v, tasks_of([(0, n, 1, past)]), scale=0.2, sight=sight)
            parts = tasks_of([(i, 1, 1, past + i) for i in range(n)])
            single = built.attend(q, tiles, v, parts, scale=0.2, sight=sight)
            if not torch.equal(many, single) or not _near(many, q, k[1], v[1], past, sight):
                return False
        if not _norms(built, q[0]) or not _products(
            built, random(77, 64).to(dtype), random(50, 64).to(dtype)
        ):
            return False
    return _draws(built, random(4, 1000) * 3)


def _products(built: Kernel, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """A linear layer against torch's, its rows alone, in parts and together."""
    if not built.multiplies(weight):
        return True
    bias, panels, size = weight[:, 0].clone(), panels_of(weight), len(weight)
    out = built.linear(x, panels, size, bias)
    parts = [built.linear(x[a:b], panels, size, bias) for a, b in ((0, 1), (1, 4), (4, 37), (37, 77))]
    wanted = x.double() @ weight.double().T + bias.double()
    near = torch.allclose(out.double(), wanted, atol=0.2 if x.dtype == torch.bfloat16 else 1e-4)
    return near and torch.equal(out, torch.cat(parts))


def _norms(built: Kernel, x: torch.Tensor) -> bool:
    """RMS norms and activations of rows `[n, d]` against the formula, alone and together."""
    weight = x[0]
    out, h = built.norm(x, weight, 1e-6), x.float()
    wanted = weight.float() * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
    alone = torch.cat([built.norm(row[None], weight, 1e-6) for row in x])
    rough = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
    near = torch.allclose(out.float(), wanted, atol=1e-6, rtol=rough) and torch.equal(out, alone)
    gate, parts = (
        built.silu(x),
        torch.cat([built.silu(x.reshape(-1)[i : i + 7]) for i in range(0, x.numel(), 7)]),
    )
    fine = torch.allclose(gate.float(), torch.nn.functional.silu(h), atol=1e-6, rtol=rough)
    both = built.silu(x, x.flip(0))
    same = torch.equal(both, gate * x.flip(0)) and torch.equal(gate.reshape(-1), parts)
    return near and fine and same


def _draws(built: Kernel, logits_BV: torch.Tensor) -> bool:
    """Draws against a cumulative sum in double precision, away from its steps."""
    heat, u = [0.7, 1.0, 2.0, 0.1], [0.0, 0.3, 0.999, 0.6]
    p = torch.softmax(logits_BV.double() / torch.tensor(heat, dtype=torch.float64)[:, None], -1).cumsum(-1)
    found = built.draw(logits_BV, heat, u)
    low = [float(p[i, t - 1]) if t else 0.0 for i, t in enumerate(found)]
    high = [float(p[i, t]) for i, t in enumerate(found)]
    return all(a - 1e-5 <= x <= b + 1e-5 for a, x, b in zip(low, u, high, strict=True))


def _near(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, sight: Sight
) -> bool:
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, 0) for x in (k, v))
    scores = q.float() @ k.transpose(1, 2) * 0.2
    scores = torch.tanh(scores / sight.cap) * sight.cap if sight.cap else scores
    at, j = past + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    if sight.slopes is not None:
        scores = scores + sight.slopes[:, None, None] * (j - at)
    scores = scores.masked_fill(sight.hides(j, at), float("-inf"))
    if sight.sinks is not None:
        scores = torch.cat([scores, sight.sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    wanted = torch.softmax(scores, -1)[..., : k.shape[1]] @ v
    return torch.allclose(
        out.float(), wanted.transpose(0, 1), atol=2e-2 if out.dtype == torch.bfloat16 else 1e-4
    )
