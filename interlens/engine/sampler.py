"""From logits to tokens: every row with its own settings and its own uniform number, no generator state.

A token is drawn by inverse CDF: the first one whose cumulative probability exceeds u. Log-probabilities and
entropy are those of the raw distribution, before any setting. Shapes: B rows, V tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlens.engine.compiled import kernel_for
from interlens.request import SamplingParams

COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures are kept within these: a quotient beyond them is no longer a number in fp32."""
WIDTH = 512
"""Tokens summed at a time."""
HEAD = 1024
"""Probabilities that are put in order first; more are where these are not enough."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row needs to be sampled."""

    params: SamplingParams
    uniform: float
    prompt: Sequence[int]
    """Ids of the prompt; read by the repetition penalty only."""
    reply: Sequence[int]
    """Ids generated so far."""


def raw_statistics(logits_BV: torch.Tensor, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
    """log p of each row's token and the entropy in nats, of the raw distribution."""
    logp = torch.log_softmax(logits_BV.float(), -1)
    chosen = logp.gather(1, torch.tensor(tokens, device=logp.device)[:, None])[:, 0]
    terms = torch.where(logp > -math.inf, logp.exp() * logp, 0.0)
    return chosen.tolist(), (-terms.sum(-1)).tolist()


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token per row; `None` where a row's settings leave no token to draw."""
    x = logits_BV.float()
    out: list[int | None] = [None] * len(draws)
    touched = [i for i, d in enumerate(draws) if _adjusts(d.params)]
    if touched:
        x = x.clone()
        for i in touched:
            _adjust(x[i], draws[i])
    top = x.amax(-1)
    possible = torch.isfinite(top).tolist()
    cold = [i for i, d in enumerate(draws) if possible[i] and d.params.temperature == 0]
    hot = [i for i, d in enumerate(draws) if possible[i] and d.params.temperature > 0]
    if cold:
        for i, token in zip(cold, x[cold].argmax(-1).tolist(), strict=True):
            out[i] = token
    if hot:
        rows, top = (x, top) if len(hot) == len(draws) else (x[hot], top[hot])
        for i, token in zip(hot, _draw(rows, top, [draws[i] for i in hot]), strict=True):
            out[i] = token
    return out


def _draw(logits_BV: torch.Tensor, top_B: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Inverse CDF; the logits are taken relative to the largest, so that no temperature overflows them."""
    heats = [min(max(d.params.temperature, COLDEST), HOTTEST) for d in draws]
    kernel = kernel_for(logits_BV.device, logits_BV.dtype)
    if kernel is not None and not any(_cuts(d.params) for d in draws):
        return kernel.draw(logits_BV, heats, [d.uniform for d in draws])
    heat = torch.tensor(heats, device=logits_BV.device)
    p = torch.softmax((logits_BV - top_B[:, None]).div_(heat[:, None]), -1)
    for i, d in enumerate(draws):
        if _cuts(d.params):
            p[i] = _cut(p[i], d.params)
    u = torch.tensor([d.uniform for d in draws], dtype=torch.float64, device=p.device)
    # first the block of tokens that the number falls into, then the token in it: one sum over all is enough
    if more := -p.shape[1] % WIDTH:
        p = torch.nn.functional.pad(p, (0, more))
    blocks = p.view(len(draws), -1, WIDTH)
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _first_above(sums, u * sums.sum(-1))
    chosen = blocks[torch.arange(len(draws), device=p.device), block].double()
    token, _ = _first_above(chosen, rest)
    return (block * WIDTH + token).tolist()


def _first_above(weights_BN: torch.Tensor, target_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the first index whose cumulative weight exceeds the target, at most the last that has weight;
    and how much of the target is left before it.
    """
    cdf = weights_BN.cumsum(-1)
    index = torch.searchsorted(cdf, target_B[:, None], right=True)
    index = torch.minimum(index, torch.searchsorted(cdf, cdf[:, -1:].clone()))
    before = cdf.gather(1, index) - weights_BN.gather(1, index)
    return index[:, 0], target_B - before[:, 0]


def _adjusts(p: SamplingParams) -> bool:
    return (
        bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    )


def _adjust(row_V: torch.Tensor, draw: Draw) -> None:
    """Logit bias, then the penalties, in place."""
    p = draw.params
    for token, bias in (p.logit_bias or {}).items():
        row_V[token] += bias
    if p.repetition_penalty != 1:
        at = torch.tensor([*draw.prompt, *draw.reply], device=row_V.device)  # twice the same is written twice
        old = row_V[at]
        row_V[at] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    if draw.reply and (p.presence_penalty or p.frequency_penalty):
        counts: dict[int, int] = {}
        for token in draw.reply:
            counts[token] = counts.get(token, 0) + 1
        at = torch.tensor(list(counts), device=row_V.device)
        times = torch.tensor(list(counts.values()), dtype=row_V.dtype, device=row_V.device)
        row_V[at] -= p.presence_penalty + p.frequency_penalty * times


def _cuts(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0


def _cut(p_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k, then top-p over what is left, then min-p; the kept tokens keep their proportions. Each keeps the
    first of the tokens in order of probability (of equal ones, those with lower ids), so a count says which.
    """
    most = min(params.top_k or len(p_V), len(p_V))
    n = most if params.top_k else min(HEAD, most)
    head, kept = _head(p_V, n, params)
    while kept == n < most:
        n = min(8 * n, most)
        head, kept = _head(p_V, n, params)
    least = head[kept - 1]
    out = torch.where(p_V > least, p_V, 0.0)
    equal = (p_V == least).nonzero()[: kept - int(out.count_nonzero()), 0]
    out[equal] = least
    return out


def _head(p_V: torch.Tensor, n: int, params: SamplingParams) -> tuple[torch.Tensor, int]:
    """The n largest probabilities, and how many of them are kept."""
    head, kept = p_V.topk(n).values, n
    if params.top_p < 1:
        whole = (head if params.top_k else p_V).sum(dtype=torch.float64)
        before = head.cumsum(0, dtype=torch.float64) - head
        kept = int((before < params.top_p * whole).sum())
    if params.min_p > 0:
        kept = min(kept, int((head >= params.min_p * head[0]).sum()))
    return head, max(kept, 1)
