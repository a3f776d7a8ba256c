"""Tried at load: does the packed rule fit this model, and is it exact on this machine?

A model that does not fit goes the slow right way, never a wrong one. Exactness is a property of kernels,
dtype, threads and processor, so it is measured: linears, attention at lengths that make BLAS change its
blocking, then the model.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from interlens.engine import linears
from interlens.engine.attention import PassPlan, decode_rows, prefill_segment
from interlens.engine.batch import Engine
from interlens.engine.compiled import kernel_for
from interlens.engine.families import Fit, fitted
from interlens.engine.kernel import Sight
from interlens.engine.kv import PAD, Segment
from interlens.engine.load import hushed
from interlens.engine.resident import evaluating
from interlens.engine.rows import Row, RowRequest
from interlens.engine.switch import device_of, switch_of
from interlens.engine.twin import twin_of
from interlens.engine.uneven import Watch
from interlens.errors import ModelError

log = logging.getLogger("interlens.engine")
TRIED = (5, 40, 23)
"""Prompts that packed passes are tried with."""
LENGTHS = (5, 63, 64, 130, 193, 260, 300, 385, 450)
"""Keys seen; 192 to 384 is where MKL was measured to change its order of sums."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test found."""

    fits: bool
    exact: bool
    why: str


def examine(model: Any) -> Verdict:
    """Run the self-test on a loaded model; a few seconds for a small one.

    Raises `ModelError` for a model that looks at the tokens after a position: it cannot continue a text.
    """
    with evaluating(list(model.modules())), hushed():
        fit = fitted(model)
        why = fit.why_not or _shrunk(model, fit) or _tried(model)
        if why:
            if not causal(model):
                raise ModelError(
                    f"{type(model).__name__} is no causal language model: what it says of a "
                    "position depends on the tokens after it"
                )
            return Verdict(False, True, why)
        try:
            why = _inexact(model, fit)
        except Exception as error:  # any failure of the fast path means the slow one
            return Verdict(False, True, f"{type(error).__name__}: {error}")
    return Verdict(True, not why, why)


def _inexact(model: Any, fit: Fit) -> str:
    """Why a row's bits are not its own, where they are not."""
    if fit.mixers:
        return "the bits of a recurrent state depend on where its row was cut"
    switch = switch_of(model)
    switch.padded = False
    switch.padded = bool(watched(model).uneven)
    seen = watched(model)
    if seen.uneven or seen.products:
        found = sorted(seen.uneven | seen.products)
        more = f" and {len(found) - 2} more" if len(found) > 2 else ""
        return f"its bits depend on how many rows a pass has: {', '.join(found[:2])}{more}"
    exact = linears_exact(model) and _attention_fixed(model) and rows_exact(model)
    return "" if exact else f"bits depend on the batch for {model.dtype} on {device_of(model).type}"


def watched(model: Any) -> Watch:
    """What may tie a row's bits to the rows beside it, seen in one pass."""
    ids = _ids(model, 37, 37)
    with Watch(len(ids)) as seen:
        _run(model, [_logits(model, ids)], budget=512)
    return seen


def _shrunk(model: Any, fit: Fit) -> str:
    """Try a small twin, whose windows are short enough to be reached; what is wrong with it, if anything."""
    twin = twin_of(model)
    if twin is None or fitted(twin).why_not:
        far = [size for sizes in fit.sights.values() for size in sizes if size >= max(TRIED)]
        return "its windows could not be tried on a small copy of it" if far else ""
    why = _tried(twin)
    return f"on a small copy of it: {why}" if why else ""


def _tried(model: Any) -> str:
    """What is wrong with packed passes of this model, if anything."""
    try:
        return "" if agrees(model) else "packed logits differ from its own forward pass"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def causal(model: Any) -> bool:
    """Whether the logits of a position stay what they are when tokens follow."""
    ids = list(_ids(model, 11, 1))
    try:
        whole, begun = (
            model(input_ids=torch.tensor([some], device=device_of(model)), use_cache=False).logits[0].float()
            for some in (ids, ids[:7])
        )
    except Exception:  # it says so itself when it is run
        return True
    close = 1e-3 if model.dtype == torch.float32 else 0.1
    return bool((whole[:7] - begun).abs().max() <= close * whole.std())


def _ids(model: Any, n: int, seed: int) -> tuple[int, ...]:
    """Ids that a model of short context reads too."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config(decoder=True)
    limit = fitted(model).limit or getattr(config, "max_position_embeddings", None) or 0
    limit = limit if limit > 0 else n + 4
    size, n = config.vocab_size, max(1, min(n, limit - 4))
    return tuple(torch.randint(min(8, size // 2), size, (n,), generator=generator).tolist())


def _run(
    model: Any, requests: list[RowRequest], budget: int
) -> tuple[list[Any], dict[int, list[torch.Tensor]]]:
    engine = Engine(model, max_rows=8, kv_bytes=0, prefill_budget=budget)
    seen: dict[int, list[torch.Tensor]] = {}

    def watch(row: Row, logits_V: torch.Tensor) -> None:
        seen.setdefault(row.ticket.number, []).append(logits_V.clone())

    engine.watch = watch
    tickets = [engine.submit(r) for r in requests]
    done: dict[int, Any] = {}
    while engine.busy:
        for completion in engine.step():
            if completion.error is not None:
                raise completion.error
            assert completion.ticket is not None
            done[completion.ticket.number] = completion
    engine.close()
    return [done[t.number] for t in tickets], seen


def _logits(model: Any, ids: tuple[int, ...]) -> RowRequest:
    return RowRequest(ids=ids, all_logits=True, reuse=False)


def agrees(model: Any) -> bool:
    """Packed logits against the model's own forward pass: rows of other lengths, cut, and continued."""
    prompts = [_ids(model, n, n) for n in TRIED]
    rows = [replace(_logits(model, ids), max_new_tokens=4) for ids in prompts]
    done, _ = _run(model, rows, budget=31)
    for ids, completion in zip(prompts, done, strict=True):
        whole = torch.tensor([[*ids, *completion.token_ids[:-1]]], device=device_of(model))
        with torch.no_grad():
            own = model(input_ids=whole, use_cache=False).logits[0].float().cpu()
        off = (own - completion.logits).abs()
        if model.dtype == torch.float32:
            fine = bool(off.max() <= 1e-3 * own.std())
        else:
            fine = bool(off.mean() <= 0.05 * own.std())
        if not fine:
            log.info("packed logits are off by %.3g (std %.3g)", float(off.max()), float(own.std()))
            return False
    return True


def linears_exact(model: Any) -> bool:
    """Each shape of linear layer, which must be a packed one: a row alone, in three, and in many."""
    shapes: set[tuple[type, torch.Size]] = set()
    module: Any
    for module in model.modules():
        if linears.packed(module) is None:
            if type(module) in (torch.nn.Linear, Conv1D):
                return False  # torch's own product gives a row other bits beside other rows
            continue
        shape = (type(module), module.weight.shape)
        if shape in shapes:
            continue
        shapes.add(shape)
        width = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        x = torch.randn(200, width, generator=torch.Generator().manual_seed(2)).to(module.weight)
        with torch.no_grad(), linears.switched_on(model):
            whole = module(x)
            parts = [module(x[a:b]) for a, b in ((0, 1), (1, 4), (4, 21), (21, 59), (59, 124), (124, 200))]
        if not torch.equal(whole, torch.cat(parts)):
            return False
    return True


def _attention_fixed(model: Any) -> bool:
    """The kernel's order of operations is fixed by construction, and was tried when it was loaded."""
    return kernel_for(device_of(model), model.dtype) is not None or attention_exact(model)


def attention_exact(model: Any) -> bool:
    """One query decoded alone, decoded among mates, and inside a prefill, at telling lengths."""
    config = model.config.get_text_config(decoder=True)
    try:
        heads = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
    except Exception:  # its config has no one answer: heads differ by layer, say
        return False
    if device_of(model).type != "cpu":
        return False
    generator = torch.Generator().manual_seed(2)
    length = -(-(max(LENGTHS) + 31) // PAD) * PAD
    keys, values = torch.randn(2, 4, kv, length, width, generator=generator).to(model.dtype)
    for n in LENGTHS:
        q_THD = torch.randn(40, heads, width, generator=generator).to(model.dtype)
        mates = [Segment(0, n + 30, 0, 1), Segment(1, n - 1, 1, 1), Segment(3, 17, 2, 1)]
        among = _decoded(q_THD[:3], keys, values, mates)[1]
        keys[0], values[0] = keys[1], values[1]
        alone = _decoded(q_THD[1:2], keys, values, [Segment(0, n - 1, 0, 1)])[0]
        start = max(0, n - 30)
        q = q_THD[: n - start].clone()
        q[-1] = q_THD[1]
        segment = Segment(1, start, 0, n - start)
        mask = PassPlan([segment]).mask(segment, Sight(), q)
        seen = mask.shape[-1]
        packed = prefill_segment(
            q.transpose(0, 1), keys[1, :, :seen], values[1, :, :seen], mask, Sight(), start
        )
        if not torch.equal(among, alone) or not torch.equal(packed[-1], alone):
            return False
    return True


def _decoded(q_tHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segments: list[Segment]) -> Any:
    plan = PassPlan(segments).decode
    assert plan is not None
    k, v = keys[: plan.span, :, : plan.length], values[: plan.span, :, : plan.length]
    return decode_rows(q_tHD, k, v, plan, Sight())


def rows_exact(model: Any) -> bool:
    """Whole rows: prefilled alone, cut among mates, and decoded, compared bit for bit."""
    ids = _ids(model, 70, 3)
    [alone], _ = _run(model, [_logits(model, ids)], budget=512)
    mates = [_logits(model, _ids(model, n, n)) for n in (9, 41)]
    among, _ = _run(model, [mates[0], _logits(model, ids), mates[1]], budget=37)
    if not torch.equal(alone.logits, among[1].logits):
        return False
    grown, seen = _run(
        model,
        [
            RowRequest(ids=_ids(model, 12, 12), max_new_tokens=6),
            RowRequest(ids=ids[:-4], max_new_tokens=5, reuse=False),
        ],
        budget=512,
    )
    [again], _ = _run(model, [_logits(model, (*ids[:-4], *grown[1].token_ids[:-1]))], budget=512)
    return torch.equal(torch.stack(seen[1]).float().cpu(), again.logits[-5:])
