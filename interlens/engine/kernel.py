"""The C kernel for exact attention: built once into the user's cache by the system compiler, tried before it
is used.

`attention.c` is the source; the library's name is a hash of it, of the compiler and of the flags, so a
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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from interlens.engine.load import cache_dir

log = logging.getLogger("interlens.engine")
SOURCE = Path(__file__).with_name("attention.c")
TILE = 16
SHARE = 16
"""Tokens of one segment that are computed together."""
MAX_QUERIES, MAX_WIDTH = 12, 256
FORMS = {
    "avx512": (
        "avx512f avx512bw avx512vl avx512dq fma",
        ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    ),
    "avx2": ("avx2 fma", ["-mavx2", "-mfma"]),
}
"""Name of a form to the processor flags it needs and the compiler flags it is built with."""
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


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


def tasks_of(items: Iterable[tuple[int, int, int, int]]) -> Tasks:
    """From (begin, count, slot, position) of each segment; long ones are cut, so that threads share them."""
    cut = [
        (begin + i, min(SHARE, count - i), slot, position + i)
        for begin, count, slot, position in items
        for i in range(0, count, SHARE)
    ]
    begin, count, slot, position = (torch.tensor(c, dtype=torch.int32) for c in zip(*cut, strict=True))
    return Tasks(
        begin=begin,
        count=count,
        slot=slot,
        position=position,
        longest=max(at + n for _, n, _, at in cut),
        tokens=sum(n for _, n, _, _ in cut),
    )


class Kernel:
    """The built library, with its arguments checked."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form = path, form
        self.build = path.stem
        self._library = ctypes.CDLL(str(path))

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
        assert keys.is_contiguous()
        assert values.is_contiguous()
        getattr(self._library, f"store_{_NAMES[key.dtype]}")(
            len(tasks.begin),
            _at(tasks.begin),
            _at(tasks.count),
            _at(tasks.slot),
            _at(tasks.position),
            heads,
            width,
            _at(key),
            _at(value),
            ctypes.c_int64(key.stride(1)),
            ctypes.c_int64(key.stride(0)),
            _at(keys),
            _at(values),
            ctypes.c_int64(values.stride(0)),
            ctypes.c_int64(values.stride(1)),
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tasks: Tasks,
        *,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries `[Hq, T, d]` against their slots: `[T, Hq, d]`; `window` 0 and `cap` 0 change nothing."""
        all_heads, n, width = query.shape
        heads, length = values.shape[1], values.shape[2]
        if query.stride(2) != 1:
            query = query.contiguous()
        assert all_heads % heads == 0
        assert tasks.tokens == n
        assert tasks.longest <= length
        out = torch.empty(n, all_heads, width, dtype=query.dtype)
        threads = torch.get_num_threads()
        stride = -(-tasks.longest // TILE) * TILE
        scratch = torch.empty(threads * MAX_QUERIES * stride)  # per call: models may run in several threads
        getattr(self._library, f"attend_{_NAMES[query.dtype]}")(
            len(tasks.begin),
            _at(tasks.begin),
            _at(tasks.count),
            _at(tasks.slot),
            _at(tasks.position),
            heads,
            all_heads // heads,
            width,
            ctypes.c_float(scale),
            window,
            ctypes.c_float(cap),
            _at(sinks) if sinks is not None else None,
            _at(query),
            ctypes.c_int64(query.stride(1)),
            ctypes.c_int64(query.stride(0)),
            _at(keys),
            _at(values),
            ctypes.c_int64(values.stride(0)),
            ctypes.c_int64(values.stride(1)),
            _at(out),
            ctypes.c_int64(out.stride(0)),
            _at(scratch),
            stride,
            threads,
        )
        return out


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The kernel, built if need be and tried; `None` where plain torch is to do the work."""
    if os.environ.get("INTERLENS_KERNEL", "1") == "0":
        return None
    form = next((name for name, (needs, _) in FORMS.items() if set(needs.split()) <= processor_flags()), None)
    compiler = next((path for c in ("cc", "gcc", "clang") if (path := shutil.which(c))), None)
    if form is None or compiler is None:
        log.info("no attention kernel: %s", "no compiler was found" if compiler is None else "no AVX2")
        return None
    try:
        built = Kernel(build(compiler, form), form)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the attention kernel could not be built, plain torch is used: %s", error)
        return None
    if not tried(built):
        log.warning("the attention kernel failed its self-test on this machine, plain torch is used")
        return None
    return built


def kernel_for(device: torch.device, dtype: torch.dtype, width: int) -> Kernel | None:
    """The kernel, if it can compute heads of this width and type there."""
    if device.type != "cpu" or dtype not in _NAMES or width % TILE or not 0 < width <= MAX_WIDTH:
        return None
    return kernel()


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
    mark = hashlib.sha256(repr((SOURCE.read_text(), version, flags, runtime)).encode()).hexdigest()[:16]
    target = cache_dir() / "kernels" / f"attention-{form}-{mark}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        thing, made = Path(work) / "attention.o", Path(work) / "attention.so"
        for command in (
            [compiler, *flags, "-c", str(SOURCE), "-o", str(thing)],
            [compiler, "-shared", str(thing), *([runtime] if runtime else []), "-lm", "-o", str(made)],
        ):
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
    """Against plain torch, and against itself with other queries beside: window, cap and sinks too."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads, group, length, width, n, past = 2, 3, 96, 32, 21, 60
    for dtype in _NAMES:
        k, v, q = (
            random(*s).to(dtype)
            for s in ((2, heads, length, width), (2, heads, length, width), (6, n, width))
        )
        tiles = k.reshape(2, heads, length // TILE, TILE, width).transpose(-1, -2).contiguous()
        for window, cap, sinks in ((0, 0.0, None), (17, 5.0, random(heads * group))):
            many = built.attend(
                q, tiles, v, tasks_of([(0, n, 1, past)]), scale=0.2, window=window, cap=cap, sinks=sinks
            )
            parts = [(i, 1, 1, past + i) for i in range(n)]
            single = built.attend(
                q, tiles, v, tasks_of(parts), scale=0.2, window=window, cap=cap, sinks=sinks
            )
            if not torch.equal(many, single) or not _near(many, q, k[1], v[1], past, window, cap, sinks):
                return False
    return True


def _near(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: int,
    window: int,
    cap: float,
    sinks: Any,
) -> bool:
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, 0) for x in (k, v))
    scores = q.float() @ k.transpose(1, 2) * 0.2
    scores = torch.tanh(scores / cap) * cap if cap else scores
    at, j = past + torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    hidden = (j > at) | (j <= at - window) if window else j > at
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    wanted = torch.softmax(scores, -1)[..., : k.shape[1]] @ v
    return torch.allclose(
        out.float(), wanted.transpose(0, 1), atol=2e-2 if out.dtype == torch.bfloat16 else 1e-4
    )
