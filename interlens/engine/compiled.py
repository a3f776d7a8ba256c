"""Where the C kernel comes from: built once into the user's cache by the system compiler, tried before it is
used.

`kernels/` holds the sources; the library's name is a hash of them, of the compiler and of the flags, so a
changed source or another processor builds another one. Without a compiler, without AVX2, or with
`INTERLENS_KERNEL=0`, plain torch does the same work. The two differ from each other in bits; each is exact in
itself.
"""

import copyreg
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from interlens.engine.kernel import TILE, TYPES, Kernel, Sight, panels_of, tasks_of
from interlens.engine.load import cache_dir

log = logging.getLogger("interlens.engine")
FOLDER = Path(__file__).with_name("kernels")
SOURCES = ("attention.c", "layers.c", "decoder.c")
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


def _reduced(_: Kernel) -> Any:
    """Another process takes its own."""
    return kernel, ()


copyreg.pickle(Kernel, _reduced)


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The kernel, if it can compute this type there."""
    return kernel() if device.type == "cpu" and dtype in TYPES else None


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
    for dtype in TYPES:
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
        products = _products(built, random(77, 64).to(dtype), random(50, 64).to(dtype))
        if not products or not _norms(built, q[0]) or not _turns(built, random(n, 8 * width).to(dtype)):
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


def _turns(built: Kernel, projected: torch.Tensor) -> bool:
    """Queries, keys and values `[n, (6 + 1 + 1) * d]` of a rotary embedding against the formula."""
    n, width, turned = len(projected), projected.shape[1] // 8, projected.shape[1] // 8 - 6
    q, k, v = (t.contiguous() for t in projected.split([6 * width, width, width], 1))
    rotary = projected[:, :turned], projected[:, 3 : turned + 3]
    keys, values = q.new_zeros(1, 1, 2, width, TILE), q.new_zeros(1, 1, 2 * TILE, width)
    out = built.rotate((q, k, v), rotary, keys, values, tasks_of([(0, n, 0, 5)])).transpose(0, 1)
    found = torch.cat([out, keys.transpose(-1, -2).reshape(1, -1, 1, width)[0, 5 : 5 + n]], 1).float()
    x = projected[:, : 7 * width].view(n, 7, width)
    a, b = x[..., :turned].chunk(2, -1)
    cosine, sine = (t[:, None] for t in rotary)
    wanted = torch.cat([x[..., :turned] * cosine + torch.cat([-b, a], -1) * sine, x[..., turned:]], -1)
    near = torch.allclose(found, wanted.float(), atol=1e-5, rtol=2 * torch.finfo(q.dtype).eps)
    return near and torch.equal(values[0, 0, 5 : 5 + n], v)


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
