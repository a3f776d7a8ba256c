"""From a completion to a message: words, ids that spell them, the record of the turn, and how its prompt
extends the last.

What was sampled is kept whole. `content_ids` says which of the ids spell the content, so that later views can
use them; where no run of whole tokens does (a stop string or a reasoning tag inside a token), it is `None`
and the words are tokenised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlens.chat import reasoning
from interlens.chat.view import Entry, View
from interlens.interp.capture import Activations
from interlens.interp.plan import Edited, RowPlan, cut
from interlens.message import Message, Prompt
from interlens.participants import Turn
from interlens.request import Completion, Generate


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """What must be known of the model that spoke."""

    name: str
    tokenizer_key: str | None
    special_ids: frozenset[int]
    n_layers: int | None


def message_of(done: Completion, request: Generate, view: View, turn: Turn, who: Speaker) -> Message:
    """Words, ids and record of one completion."""
    parted = split_reply(done, view)
    meta: dict[str, Any] = {
        "turn": turn.turn,
        "n_tokens": done.n_tokens,
        "n_prompt_tokens": done.n_prompt_tokens,
        "finish": done.finish,
        "seed": turn.stream.job,
        "sampling": _applied(request),
        "reused_tokens": done.reused_tokens,
        "shared_prefill": done.shared_prefill,
        "seconds": done.timings.get("seconds"),
    }
    if who.tokenizer_key is not None:
        meta |= {"tokenizer": who.tokenizer_key} | _spelling(done, parted.start, who.special_ids)
    if parted.reasoning is not None:
        meta |= {"reasoning": parted.reasoning, "reasoning_text": done.text[: parted.start]}
    if done.served is not None:
        meta |= served(done.served)
    for name in ("logprobs", "entropy", "top_logprobs", "usage"):
        if (value := getattr(done, name)) is not None:
            meta[name] = value
    acts = None
    receipts: list[Any] = []
    if turn.captures and done.captures is not None and who.n_layers is not None:
        items, receipts = cut(
            turn.captures,
            done.captures,
            view,
            done.n_tokens,
            turn.turn,
            who.n_layers,
            thought=_tokens_before(done, parted.start),
            ended=done.finish == "eos",
            said=done.token_ids,
        )
        acts = Activations(items)
    if receipts := [*receipts, *done.receipts]:
        meta["receipts"] = receipts
    edited = None
    if isinstance(request.plan, RowPlan):
        edited = Edited.of(request.plan, view.ids, done.token_ids, done.finish == "eos")
    return Message(
        who.name,
        done.text[parted.start :],
        token_ids=done.token_ids or None,
        metadata=meta,
        activations=acts,
        edits=edited.edits if edited is not None else (),
    )


def served(found: Mapping[str, Any]) -> dict[str, Any]:
    """Who answered, of a hosted model; its reasoning is kept where a local model's is."""
    out = {name: found[name] for name in ("provider", "model") if name in found}
    if thought := found.get("reasoning"):
        out |= {"reasoning": thought, "reasoning_text": f"<think>\n{thought}\n</think>\n\n"}
    rest = {k: v for k, v in found.items() if k not in ("provider", "model", "reasoning") and v is not None}
    return out | ({"served": rest} if rest else {})


def split_reply(done: Completion, view: View) -> reasoning.Split:
    """Where the answer of a completion begins."""
    return reasoning.split(done.text, view.waits_for, cut=done.finish != "eos")


def _tokens_before(done: Completion, start: int) -> int:
    """How many of the sampled tokens lie before a character, whole or in part."""
    if start <= 0:
        return 0
    last = len(done.token_ids) - (done.finish == "eos")
    return next((k + 1 for k, end in enumerate(done.offsets[:last]) if end >= start), last)


def _applied(request: Generate) -> dict[str, Any]:
    out = request.sampling.applied() | {"max_new_tokens": request.max_new_tokens}
    return out | ({"stop": list(request.stop)} if request.stop else {})


def _spelling(done: Completion, start: int, special: frozenset[int]) -> dict[str, Any]:
    """Which of the sampled ids spell the content, if whole tokens do."""
    ends, ids = done.offsets, done.token_ids
    out: dict[str, Any] = {}
    last = len(ids)
    if done.finish == "eos" and ids:
        last -= 1
        out["end_id"] = ids[-1]
    first = _tokens_before(done, start)
    exact = start == 0 or (first > 0 and len(ends) >= first and ends[first - 1] == start)
    if done.finish == "stop":
        last = next((k for k, end in enumerate(ends) if end > len(done.text)), last)
        exact = exact and (last == 0 or ends[last - 1] == len(done.text))
    out["content_ids"] = [first, max(first, last)] if exact else None
    if any(i in special for i in ids[first:last]):
        out["control_ids"] = True
    return out


def _last_own(entries: Sequence[Entry], name: str) -> Message | None:
    return next((e.message for e in reversed(entries) if e.message.author == name and e.message.prompt), None)


def prompt_of(view: View, entries: Sequence[Entry], name: str) -> Prompt | None:
    """The view's ids as a difference to the speaker's last turn."""
    if view.segments is None:
        return None
    base = _last_own(entries, name)
    if base is None:
        return Prompt(view.ids)
    keep = _agreement(view.ids, base)
    return Prompt(view.ids[keep:], base, keep)


def _agreement(ids: Sequence[int], base: Message) -> int:
    before = (*(base.prompt_ids or ()), *(base.token_ids or ()))
    n, limit = 0, min(len(before), len(ids))
    while n < limit and before[n] == ids[n]:
        n += 1
    return n


def divergence(view: View, entries: Sequence[Entry], kept: int, name: str) -> dict[str, Any]:
    """Where and why this prompt does not extend the speaker's last one; nothing if it does."""
    base = _last_own(entries, name) if view.segments is not None else None
    if base is None or base.metadata.get("tokenizer") is None:
        return {}
    whole = len(base.prompt_ids or ()) + len(base.token_ids or ())
    keep = _agreement(view.ids, base)
    if keep >= whole - (base.metadata.get("finish") == "eos"):
        return {}
    if kept < len(entries):
        why = "the context policy left messages out"
    elif base.metadata.get("reasoning"):
        why = "reasoning is not shown in later turns"
    elif base.metadata.get("content_ids") is None or base.metadata.get("finish") == "stop":
        why = "a stop string cut the reply"
    elif base.metadata.get("tool_trail"):
        why = "the template renders tool calls in its own way"
    else:
        why = "the template or the history rewrites what came before"
    return {"diverges": {"position": keep, "of": whole, "why": why}}
