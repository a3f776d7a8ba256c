"""What transformers itself offers: `generate` in three ways, and its continuous batching."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig
from workloads import Conversation, History, advance, lockstep

PAGE = 16
"""Tokens of a page of continuous batching, the unit in which it shares prefixes."""


def load(model: str, dtype: str) -> Any:
    """The plain module."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def settings(new: int) -> GenerationConfig:
    """Sample exactly `new` tokens: no id ends a reply."""
    return GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        eos_token_id=-1,
        pad_token_id=0,
    )


class Generate:
    """`generate` in three ways.

    `alone` and `cache` take a conversation at a time; a turn is prefilled anew, or continues its speaker's
    cache. `padded` takes all of them as one left-padded batch, prefilled anew each turn. The batch runs as
    long as its longest reply; what a row has beyond its own length is thrown away and not counted.
    """

    packages = ()

    def __init__(self, model: str, dtype: str) -> None:
        self.model = load(model, dtype)
        self.notes: dict[str, Any] = {}

    @torch.inference_mode()
    def run(self, conversations: Sequence[Conversation], *, how: str) -> list[History]:
        """Run the conversations, nothing kept from an earlier run."""
        if how == "padded":
            return lockstep(conversations, self._padded)
        return [self._alone(conversation, reuse=how == "cache") for conversation in conversations]

    def _alone(self, conversation: Conversation, *, reuse: bool) -> History:
        speakers = conversation.openings
        caches = cycle([DynamicCache(config=self.model.config) if reuse else None for _ in speakers])

        def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
            ids = torch.tensor(prompts)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=next(caches),
                generation_config=settings(lengths[0]),
            )
            return out[:, ids.shape[1] :].tolist()

        return lockstep([conversation], generate)[0]

    def _padded(self, prompts: list[list[int]], lengths: list[int]) -> Iterable[list[int]]:
        width = max(map(len, prompts))
        out = self.model.generate(
            torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            generation_config=settings(max(lengths)),
        )
        return (row[:n] for row, n in zip(out[:, width:].tolist(), lengths, strict=True))


def pages(conversations: Sequence[Conversation]) -> int:
    """Pages of keys that hold every speaker's whole conversation, and as much again.

    Left to itself the manager takes 60 % of the machine's memory, and writes to all of it each time.
    """
    whole = [(len(c.prompt([[0] * n for n in c.replies])), len(c.openings)) for c in conversations]
    return sum(2 * speakers * -(-length // PAGE) for length, speakers in whole)


class ContinuousBatching:
    """transformers' continuous batching, prefix sharing on; conversations advance on their own."""

    packages = ()

    def __init__(self, model: str, dtype: str) -> None:
        self.model = load(model, dtype)
        self.notes: dict[str, Any] = {}

    @torch.inference_mode()
    def run(self, conversations: Sequence[Conversation]) -> list[History]:
        """Run the conversations in a fresh manager."""
        with self.model.continuous_batching_context_manager(
            generation_config=settings(max(n for c in conversations for n in c.replies)),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=pages(conversations), max_batch_tokens=512
            ),
        ) as manager:

            def submit(number: int, conversation: Conversation, history: History) -> str:
                new = conversation.replies[len(history)]
                return manager.add_request(conversation.prompt(history), max_new_tokens=new)

            def step() -> Iterable[tuple[str, Sequence[int]]]:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
                if result is not None and result.error is not None:
                    raise RuntimeError(str(result.error))
                if result is not None and result.is_finished():
                    yield result.request_id, result.generated_tokens

            return advance(conversations, submit, step)
