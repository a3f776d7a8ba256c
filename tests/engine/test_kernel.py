"""The C kernel: built, right, exact in itself, refused where it must be, and the engine does without it."""

import logging
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from interlens.engine import compiled as kernels
from interlens.engine.compiled import build, kernel, kernel_for, tried
from interlens.engine.kernel import SHARE, TILE, Kernel, Sight, panels_of, tasks_of
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


def turned(form, dtype, tasks=None, width=80, part=48, n=23, heads=3):
    """Queries, keys and values after a rotary embedding, and what they were made from."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(n, h * width, generator=generator).to(dtype) for h in (2 * heads, heads, heads))
    rotary = tuple(torch.randn(n, part, generator=generator).to(dtype) for _ in range(2))
    keys, values = torch.zeros(2, heads, 4, width, TILE).to(dtype), torch.zeros(2, heads, 64, width).to(dtype)
    out = form.rotate((q, k, v), rotary, keys, values, tasks or tasks_of([(0, n, 1, 30)]))
    return out, keys, values, (q, k, v, *rotary)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "part"), [(64, 64), (80, 80), (80, 48), (128, 32), (16, 10)])
def test_a_rotary_embedding_is_transformers_own(dtype, width, part):
    out, keys, values, (q, k, v, cosine, sine) = turned(built, dtype, width=width, part=part)
    for found, given in (
        (out, q),
        (keys[1].transpose(-1, -2).reshape(3, 64, width)[:, 30:53], k),
    ):
        x = given.view(23, -1, width).transpose(0, 1)
        own, _ = apply_rotary_pos_emb(x[None, ..., :part], x[None, ..., :part], cosine[None], sine[None])
        assert torch.allclose(found[..., :part], own[0], atol=1e-6, rtol=torch.finfo(dtype).eps)
        assert torch.equal(found[..., part:], x[..., part:])
    assert torch.equal(values[1, :, 30:53], v.view(23, 3, width).transpose(0, 1))
    assert not values[0].any()
    assert not values[1, :, :30].any()
    assert not keys[1, :, 0].any()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rotary_embedding_does_not_depend_on_the_pass(dtype):
    whole = turned(built, dtype)
    parts = turned(built, dtype, tasks_of([(0, 1, 1, 30), (1, 4, 1, 31), (5, 18, 1, 35)]))
    assert all(torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True))


def every_form():
    flags = kernels.processor_flags()
    compiler = next(p for c in ("cc", "gcc", "clang") if (p := kernels.shutil.which(c)))
    return [
        Kernel(build(compiler, name), name)
        for name, (needs, _) in kernels.FORMS.items()
        if set(needs.split()) <= flags
    ]


@needs_kernel
def test_all_forms_have_the_same_bits():
    forms = every_form()
    if len(forms) == 1:
        pytest.skip("this processor has one form only")
    q, tiles, _, v = rows(torch.float32)
    line = torch.linspace(-1, 1, q.shape[0])
    weight = torch.randn(77, 45, generator=torch.Generator().manual_seed(1))
    x = torch.randn(21, 45, generator=torch.Generator().manual_seed(2))
    for sight in (Sight(), Sight(window=9, cap=3.0, sinks=line), Sight(chunk=21, slopes=line / 5)):
        outs = [f.attend(q, tiles, v, tasks_of([(0, 40, 2, 60)]), scale=0.3, sight=sight) for f in forms]
        assert all(torch.equal(out, outs[0]) for out in outs)
    outs = [f.linear(x, panels_of(weight), 77, weight[:, 0]) for f in forms]
    assert all(torch.equal(out, outs[0]) for out in outs)
    outs = [turned(f, torch.float32)[0] for f in forms]
    assert all(torch.equal(out, outs[0]) for out in outs)
    outs = [f.norm(q[0], q[0, 0], 1e-5) for f in forms]
    assert all(torch.equal(out, outs[0]) for out in outs)
    draws = [f.draw(x * 4, [0.8] * 21, torch.linspace(0, 0.999, 21).tolist()) for f in forms]
    assert all(drawn == draws[0] for drawn in draws)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "width"), [(1, 32), (47, 64), (48, 33), (100, 576), (576, 1536), (33, 96)])
def test_a_product_is_right_and_a_row_s_own_at_every_number_of_rows(dtype, size, width):
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, width, generator=generator).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    if not built.multiplies(weight):
        assert dtype == torch.bfloat16
        return
    x = torch.randn(70, width, generator=generator).to(dtype)
    panels = panels_of(weight)
    for given in (None, bias):
        whole = built.linear(x, panels, size, given)
        wanted = x.double() @ weight.double().T + (given.double() if given is not None else 0)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(whole.double(), wanted, rtol=eps, atol=1e-6 * width)
        for n in (*range(1, 20), 31, 32, 33, 48, 65, 70):
            assert torch.equal(built.linear(x[70 - n :], panels, size, given), whole[70 - n :])
    strided = torch.cat([x, x], 1)[:, :width]
    assert torch.equal(built.linear(strided, panels, size, bias), built.linear(x, panels, size, bias))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_does_not_depend_on_the_number_of_threads(dtype):
    weight, x = torch.randn(500, 128).to(dtype), torch.randn(40, 128).to(dtype)
    if not built.multiplies(weight):
        return
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(built.linear(x, panels_of(weight), 500, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@needs_kernel
def test_numbers_that_are_none_stay_in_their_row():
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = torch.randn(64, 64).to(dtype), torch.randn(20, 64).to(dtype)
        if not built.multiplies(weight):
            continue
        clean = built.linear(x, panels_of(weight), 64, None)
        x[7, 3] = float("nan")
        x[8, 3] = float("inf")
        spoilt = built.linear(x, panels_of(weight), 64, None)
        assert spoilt[7].isnan().all()
        others = [i for i in range(20) if i not in (7, 8)]
        assert torch.equal(spoilt[others], clean[others])


@needs_kernel
def test_draws_are_those_of_the_cumulative_distribution():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 1300, generator=generator) * 4
    logits[:, ::7] = float("-inf")
    heat = torch.rand(200, generator=generator) * 2 + 0.05
    u = torch.rand(200, generator=generator, dtype=torch.float64)
    cdf = torch.softmax(logits.double() / heat[:, None].double(), -1).cumsum(-1)
    found = built.draw(logits, heat.tolist(), u.tolist())
    wanted = torch.searchsorted(cdf, u[:, None], right=True)[:, 0].tolist()
    near = [min(abs(float(cdf[i, t] - u[i])) for t in (w - 1, w) if t >= 0) for i, w in enumerate(wanted)]
    assert all(f == w or gap < 1e-5 for f, w, gap in zip(found, wanted, near, strict=True))
    assert sum(f == w for f, w in zip(found, wanted, strict=True)) > 190


@needs_kernel
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_draw_never_gives_a_token_without_weight(u):
    logits = torch.full((1, 2000), float("-inf"))
    for only in (0, 511, 512, 1999):
        one = logits.clone()
        one[0, only] = -3.0
        assert built.draw(one, [1e-30], [u]) == [only]
    two = logits.clone()
    two[0, [5, 900]] = torch.tensor([0.0, 1.0])
    assert built.draw(two, [1.0], [u])[0] in (5, 900)
    assert built.draw(two, [1e-30], [u]) == [900]


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
    anew.setattr(kernels, "FOLDER", kernels.FOLDER.parent)  # where these sources are not
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
