"""The work that engines are given: conversations as data, and the two ways of driving them.

A conversation is token-level. A participant's prompt is its opening and all that was said so far, so its
later prompt strictly extends its earlier prompt plus what it said. Only the standard library is used: vLLM
reads this file in an environment of its own.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

History = list[list[int]]
"""What was said: the ids of each turn."""

SCENARIO = (
    "Two strangers sit in a mountain hut while a storm holds the path closed. They have not met before. "
    "Nobody can say when the wind will drop, and there is wood for one night only. They speak about where "
    "they were going, what they have left at home, and what they would do differently."
)
NAMES = (
    "Ana",
    "Boris",
    "Chen",
    "Dora",
    "Emil",
    "Fatima",
    "Goran",
    "Hana",
    "Ivan",
    "Jana",
    "Karim",
    "Lena",
    "Milo",
    "Nina",
    "Omar",
    "Petra",
)


@dataclass(frozen=True)
class Conversation:
    """Participants who take turns; each turn has a fixed number of new tokens."""

    openings: Sequence[Sequence[int]]
    """How each participant's prompt begins."""
    mine: Sequence[int]
    """Ids before a turn of one's own."""
    theirs: Sequence[int]
    """Ids before a turn of somebody else."""
    end: Sequence[int]
    """Ids after every turn."""
    replies: Sequence[int]
    """New tokens of each turn."""

    def prompt(self, history: Sequence[Sequence[int]]) -> list[int]:
        """The ids that the next speaker reads."""
        me = len(history) % len(self.openings)
        ids = list(self.openings[me])
        for turn, said in enumerate(history):
            ids += [*(self.mine if turn % len(self.openings) == me else self.theirs), *said, *self.end]
        return [*ids, *self.mine]


@dataclass(frozen=True)
class Workload:
    """Conversations that are run together."""

    about: str
    conversations: Sequence[Conversation]
    few: int
    """How many of them an engine that takes one at a time is given."""

    def some(self, few: bool) -> Sequence[Conversation]:
        """All conversations, or `few` of them, evenly spaced."""
        return (
            self.conversations[:: max(1, len(self.conversations) // self.few)][: self.few]
            if few
            else (self.conversations)
        )


def two_party(tokenizer: Any, conversations: int, turns: int, new: int) -> list[Conversation]:
    """Conversations of two participants who share a scenario; neighbours have other names."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def opening(name: str, first: bool) -> tuple[int, ...]:
        begin = "<|im_start|>user\nBegin the conversation.<|im_end|>\n" if first else ""
        return encode(f"<|im_start|>system\n{SCENARIO} You are {name}.<|im_end|>\n{begin}")

    return [
        Conversation(
            openings=tuple(opening(NAMES[(2 * c + p) % len(NAMES)], p == 0) for p in (0, 1)),
            mine=encode("<|im_start|>assistant\n"),
            theirs=encode("<|im_start|>user\n"),
            end=encode("<|im_end|>\n"),
            replies=(new,) * turns,
        )
        for c in range(conversations)
    ]


def mixed(
    tokenizer: Any, rows: int, prompts: tuple[int, int], replies: tuple[int, int]
) -> list[Conversation]:
    """Single turns of any length in the two ranges, with nothing in common."""
    chance = random.Random(0)
    words = tokenizer(SCENARIO, add_special_tokens=False)["input_ids"]
    return [
        Conversation(
            openings=(tuple(chance.choices(words, k=chance.randint(*prompts))),),
            mine=(),
            theirs=(),
            end=(),
            replies=(chance.randint(*replies),),
        )
        for _ in range(rows)
    ]


def workloads(tokenizer: Any, small: bool = False) -> dict[str, Workload]:
    """The workloads by name; the small ones only show that everything runs."""
    n, turns, new, many, rounds, rows = (3, 2, 4, 6, 5, 6) if small else (16, 6, 48, 64, 20, 64)
    prompts, replies = ((5, 30), (2, 6)) if small else ((20, 300), (8, 88))

    def talk(conversations: int, turns: int, few: int) -> Workload:
        about = f"{conversations} two-party conversations x {turns} turns x {new} new tokens"
        return Workload(about, two_party(tokenizer, conversations, turns, new), few)

    singles = (
        f"{rows} single turns, prompts of {prompts[0]} to {prompts[1]} tokens, "
        f"{replies[0]} to {replies[1]} new tokens"
    )
    return {
        "W": talk(n, turns, 2),
        "one": talk(1, turns, 1),
        "mixed": Workload(singles, mixed(tokenizer, rows, prompts, replies), 8),
        "rows64": talk(many, 2, 4),
        "long": talk(2 if small else 4, rounds, 1),
    }


def shortened(work: Workload) -> Workload:
    """The same with two turns of at most 8 tokens, to warm up with."""
    return replace(
        work,
        conversations=[replace(c, replies=[min(n, 8) for n in c.replies[:2]]) for c in work.conversations],
    )


def advance(
    conversations: Sequence[Conversation],
    submit: Callable[[int, Conversation, History], Any],
    step: Callable[[], Iterable[tuple[Any, Sequence[int]]]],
) -> list[History]:
    """Drive every conversation on its own: its next turn is submitted as soon as the last one is finished.

    `submit` gets a conversation's number, the conversation and its history, and gives a ticket; `step` gives
    the tickets and ids of the turns that are finished.
    """
    histories: list[History] = [[] for _ in conversations]
    running = {submit(i, c, histories[i]): i for i, c in enumerate(conversations)}
    while running:
        for ticket, ids in step():
            i = running.pop(ticket)
            histories[i].append(list(ids))
            if len(histories[i]) < len(conversations[i].replies):
                running[submit(i, conversations[i], histories[i])] = i
    return histories


def lockstep(
    conversations: Sequence[Conversation],
    generate: Callable[[list[list[int]], list[int]], Iterable[Sequence[int]]],
) -> list[History]:
    """Drive them turn by turn: `generate` gets all prompts of a turn and how long to reply."""
    histories: list[History] = [[] for _ in conversations]
    for turn in range(max(len(c.replies) for c in conversations)):
        live = [(c, h) for c, h in zip(conversations, histories, strict=True) if turn < len(c.replies)]
        prompts, lengths = [c.prompt(h) for c, h in live], [c.replies[turn] for c, _ in live]
        for (_, history), reply in zip(live, generate(prompts, lengths), strict=True):
            history.append(list(reply))
    return histories


def least_prefill(conversations: Sequence[Conversation], histories: Sequence[History]) -> int:
    """Prompt tokens that any engine must run: those that are in no earlier prompt, and were not decoded.

    The last token of a reply is drawn but never run, so it counts where a later prompt holds it.
    """
    nodes: dict[tuple[int, int], int] = {}

    def walk(ids: Iterable[int], node: int = 0) -> int:
        for token in ids:
            node = nodes.setdefault((node, token), len(nodes) + 1)
        return node

    count = 0
    for turn in range(max(map(len, histories))):
        for conversation, history in zip(conversations, histories, strict=True):
            if turn < len(history):
                known = len(nodes)
                end = walk(conversation.prompt(history[:turn]))
                count += len(nodes) - known
                walk(islice(history[turn], len(history[turn]) - 1), end)
    return count
