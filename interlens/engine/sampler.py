"""From logits to tokens: every row with its own settings and its own uniform number, no generator state.

A token is drawn by inverse CDF: the first one whose cumulative probability exceeds u. Log-probabilities and
entropy are those of the raw distribution, before any setting. Shapes: B rows, V tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlens.request import SamplingParams


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


def sample(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row."""
    x = logits_BV.float()
    touched = [i for i, d in enumerate(draws) if _adjusts(d.params)]
    if touched:
        x = x.clone()
        for i in touched:
            _adjust(x[i], draws[i])
    out = x.argmax(-1).tolist()
    hot = [i for i, d in enumerate(draws) if d.params.temperature > 0]
    if not hot:
        return out  # type: ignore[no-any-return]
    rows = x if len(hot) == len(draws) else x[hot]
    heat = torch.tensor([draws[i].params.temperature for i in hot], device=x.device)[:, None]
    p = torch.softmax(rows / heat, -1)
    for place, i in enumerate(hot):
        if _cuts(draws[i].params):
            p[place] = _cut(p[place], draws[i].params)
    cdf = p.cumsum(-1, dtype=torch.float64)
    u = torch.tensor([draws[i].uniform for i in hot], dtype=torch.float64, device=x.device)[:, None]
    tokens = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0].clamp_(max=p.shape[-1] - 1)
    for i, token in zip(hot, tokens.tolist(), strict=True):
        out[i] = token
    return out  # type: ignore[no-any-return]


def _adjusts(p: SamplingParams) -> bool:
    return (
        bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    )


def _adjust(row_V: torch.Tensor, draw: Draw) -> None:
    """Logit bias, then the penalties, in place."""
    p = draw.params
    for token, bias in (p.logit_bias or {}).items():
        row_V[token] += bias
    if p.repetition_penalty != 1 and (seen := sorted({*draw.prompt, *draw.reply})):
        at = torch.tensor(seen, device=row_V.device)
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
    """Top-k, then top-p over what is left, then min-p; the kept tokens keep their proportions."""
    ordered, index = p_V.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1:
        kept = torch.where(keep, ordered, 0.0)
        before = kept.cumsum(-1, dtype=torch.float64) - kept
        keep &= before < params.top_p * kept.sum(dtype=torch.float64)
    if params.min_p > 0:
        keep &= ordered >= params.min_p * ordered[0]
    keep[0] = True
    out = torch.zeros_like(p_V)
    out[index[keep]] = ordered[keep]
    return out
