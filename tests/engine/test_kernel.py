"""The C kernel: built, right, exact in itself, refused where it must be, and the engine does without it."""

import logging
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from interlens.engine import kernel as kernels
from interlens.engine.kernel import SHARE, TILE, Kernel, Sight, build, kernel, kernel_for, tasks_of, tried
from interlens.engine.kv import Slots
from interlens.engine.load import tiny

built = kernel()
needs_kernel = pytest.mark.skipif(
    built is None, reason="no compiler or no AVX2 here: plain torch does the work"
)


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A fresh look for the kernel, in an empty cache."""
    monkeypatch.setenv("INTERLENS_CACHE", str(tmp_path))
    kernel.cache_clear()
    yield monkeypatch
    kernel.cache_clear()


def rows(dtype, heads=2, group=3, width=32, length=256, n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(3, heads, length, width, generator=generator).to(dtype) for _ in "kv")
    q = torch.randn(heads * group, n, width, generator=generator).to(dtype)
    return q, k.reshape(3, heads, length // TILE, TILE, width).transpose(-1, -2).contiguous(), k, v


def by_hand(q, k, v, position, scale, sight):
    """One query after the other, in double precision."""
    group = q.shape[0] // k.shape[0]
    out = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=torch.float64)
    for head in range(q.shape[0]):
        keys, values = k[head // group].double(), v[head // group].double()
        for i in range(q.shape[1]):
            p = position + i
            low = max(0, p + 1 - sight.window) if sight.window else 0
            low = max(low, p // sight.chunk * sight.chunk) if sight.chunk else low
            scores = keys[low : p + 1] @ q[head, i].double() * scale
            scores = torch.tanh(scores / sight.cap) * sight.cap if sight.cap else scores
            if sight.slopes is not None:
                scores = scores + sight.slopes[head].double() * (torch.arange(low, p + 1) - p)
            weights = scores.exp()
            total = weights.sum() + (sight.sinks[head].double().exp() if sight.sinks is not None else 0)
            out[i, head] = (weights / total) @ values[low : p + 1]
    return out


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "chunk", "cap", "sunk", "sloped"),
    [
        (0, 0, 0.0, False, False),
        (19, 0, 0.0, False, False),
        (0, 17, 0.0, False, False),
        (0, 0, 5.0, False, False),
        (0, 0, 0.0, False, True),
        (50, 70, 9.0, True, True),
    ],
)
@pytest.mark.parametrize(("group", "width"), [(1, 16), (3, 64), (5, 80), (16, 128)])
def test_it_agrees_with_attention_by_hand(dtype, window, chunk, cap, sunk, sloped, group, width):
    q, tiles, k, v = rows(dtype, group=group, width=width, n=9)
    line = torch.linspace(-1, 1, q.shape[0])
    sight = Sight(window, chunk, cap, line if sunk else None, line / 7 if sloped else None)
    tasks = tasks_of([(0, 9, 1, 130)])
    out = built.attend(q, tiles, v, tasks, scale=0.2, sight=sight)
    wanted = by_hand(q, k[1], v[1], 130, 0.2, sight)
    assert torch.allclose(out.double(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_has_its_bits_whatever_is_beside_it(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, tiles, _, v = rows(dtype)
        whole = built.attend(q, tiles, v, tasks_of([(0, 40, 1, 0)]), scale=0.2)
        for cuts in ([1] * 40, [7, 33], [39, 1], [16, 16, 8]):
            parts, at = [], 0
            for n in cuts:
                own = q[:, at : at + n]
                beside = tasks_of([(0, n, 1, at)])
                parts.append(built.attend(own, tiles, v, beside, scale=0.2))
                at += n
            assert torch.equal(torch.cat(parts), whole)
        mates = tasks_of([(0, 1, 0, 200), (1, 1, 1, 17), (2, 1, 2, 3)])
        among = built.attend(q[:, [5, 17, 9]].contiguous(), tiles, v, mates, scale=0.2)
        assert torch.equal(among[1], whole[17])
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_two_models_in_two_threads_do_not_disturb_each_other():
    """ctypes lets go of the interpreter's lock: passes really overlap, and may share nothing."""
    cases = [(rows(torch.float32, seed=s), tasks_of([(0, 40, s % 3, 100)])) for s in range(2)]

    def run(case):
        (q, tiles, _, v), tasks = case
        return [built.attend(q, tiles, v, tasks, scale=0.2) for _ in range(150)]

    wanted = [run(case)[0] for case in cases]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, cases))
    assert all(torch.equal(out, w) for outs, w in zip(found, wanted, strict=True) for out in outs)


@needs_kernel
def test_both_forms_have_the_same_bits():
    if not {"avx512f", "fma"} <= kernels.processor_flags():
        pytest.skip("this processor has one form only")
    compiler = next(p for c in ("cc", "gcc", "clang") if (p := kernels.shutil.which(c)))
    forms = [Kernel(build(compiler, name), name) for name in kernels.FORMS]
    q, tiles, _, v = rows(torch.float32)
    line = torch.linspace(-1, 1, q.shape[0])
    for sight in (Sight(), Sight(window=9, cap=3.0, sinks=line), Sight(chunk=21, slopes=line / 5)):
        tasks = tasks_of([(0, 40, 2, 60)])
        first, second = (f.attend(q, tiles, v, tasks, scale=0.3, sight=sight) for f in forms)
        assert torch.equal(first, second)


def test_long_segments_are_shared_out():
    tasks = tasks_of([(0, 1, 4, 9), (1, 2 * SHARE + 3, 2, 5)])
    assert tasks.count.tolist() == [1, SHARE, SHARE, 3]
    assert tasks.position.tolist() == [9, 5, 5 + SHARE, 5 + 2 * SHARE]
    assert (tasks.tokens, tasks.longest) == (2 * SHARE + 4, 2 * SHARE + 8)


def test_it_is_switched_off_by_one_setting(anew):
    anew.setenv("INTERLENS_KERNEL", "0")
    assert kernel() is None


def test_without_a_compiler_plain_torch_does_the_work(anew):
    anew.setattr(kernels.shutil, "which", lambda name: None)
    assert kernel() is None


def test_without_avx2_it_is_refused(anew):
    anew.setattr(kernels, "processor_flags", lambda: {"sse2"})
    assert kernel() is None


@needs_kernel
def test_a_compiler_that_fails_is_told_in_the_log(anew, caplog):
    anew.setattr(kernels, "SOURCE", kernels.SOURCE.with_name("tiny.py"))
    with caplog.at_level(logging.WARNING, "interlens.engine"):
        assert kernel() is None
    assert "could not be built" in caplog.text


@needs_kernel
def test_a_kernel_that_is_wrong_is_not_used(anew, caplog):
    right = Kernel.attend
    anew.setattr(Kernel, "attend", lambda self, *a, **k: 1.01 * right(self, *a, **k))
    with caplog.at_level(logging.WARNING, "interlens.engine"):
        assert kernel() is None
    assert "self-test" in caplog.text


@needs_kernel
def test_it_is_built_once(anew, tmp_path):
    run = subprocess.run

    def no_building(command, **options):
        assert "-c" not in command
        return run(command, **options)

    assert tried(kernel())
    [made] = tmp_path.rglob("*.so")
    kernel.cache_clear()
    anew.setattr(subprocess, "run", no_building)
    assert kernel().path == made


def test_what_it_cannot_compute_goes_to_plain_torch():
    assert kernel_for(torch.device("cpu"), torch.float16) is None
    assert kernel_for(torch.device("meta"), torch.float32) is None
    model, _ = tiny()
    slots = Slots(model.config, built)
    for width, tiles in ((64, True), (256, True), (20, False), (512, False)):
        like = torch.zeros(1, 2, 3, width)
        assert slots._tiles(like, like) == (tiles and built is not None)
    assert not slots._tiles(torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 16))
