"""The list of messages: index, slice, append, print, a table, and JSON in and out."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

from interlens import html
from interlens.message import Message, Prompt, sound, tagged, untagged

if TYPE_CHECKING:
    import pandas


class Transcript:
    """What was said, in order, moderator messages included. A slice is a transcript of its own."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages = list(messages)
        self.shown: tuple[Any, int] | None = None
        """The notebook cell that showed the words as they came, and how many messages there were then."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as a tuple."""
        return tuple(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(tuple(self._messages))

    @overload
    def __getitem__(self, key: int) -> Message: ...
    @overload
    def __getitem__(self, key: slice) -> "Transcript": ...
    def __getitem__(self, key: int | slice) -> "Message | Transcript":
        if isinstance(key, slice):
            return Transcript(self._messages[key])
        try:
            return self._messages[key]
        except IndexError:
            raise IndexError(
                f"message {key} was asked for; the transcript has {len(self)} messages"
            ) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self._messages == other._messages

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        authors = list(dict.fromkeys(m.author for m in self._messages))
        return f"Transcript({len(self)} messages by {', '.join(authors) or 'nobody'})"

    def append(self, author: str | Message, content: str | None = None, **metadata: Any) -> Message:
        """Append words by an author, or a whole `Message`; return the message."""
        if isinstance(author, Message):
            if content is not None or metadata:
                raise TypeError(
                    "append() takes a whole message, or an author with words and metadata, not both"
                )
            message = author
        else:
            message = Message(author, content or "", metadata=metadata)
        self._messages.append(message)
        return message

    def index(self, ref: int | Message) -> int:
        """Turn a message index (negative counts from the end) or a message into a position."""
        if isinstance(ref, Message):
            for i, message in enumerate(self._messages):
                if message is ref:
                    return i
            if ref in self._messages:
                return self._messages.index(ref)
            raise ValueError(f"{ref!r} is not in this transcript of {len(self)} messages")
        if not isinstance(ref, int) or isinstance(ref, bool):
            raise TypeError(f"a message index is a whole number or a message, got {ref!r}")
        if not -len(self) <= ref < len(self):
            raise IndexError(f"message {ref} was asked for; the transcript has {len(self)} messages")
        return ref % len(self)

    def copy(self) -> "Transcript":
        """A transcript of its own with the same messages."""
        return Transcript(self._messages)

    def cut(self, length: int) -> None:
        """Keep the first `length` messages."""
        del self._messages[length:]
        self.shown = None

    def replace(self, index: int, message: Message) -> None:
        """Put another message in the place of one."""
        self._messages[index] = message
        self.shown = None

    def pretty(self) -> str:
        """The whole exchange as text for a terminal."""
        return "\n\n".join(f"{m.author}: {m.content}" for m in self._messages)

    def frame(self) -> "pandas.DataFrame":
        """One row per message: index, author, content, turn, n_tokens, finish, seed."""
        import pandas

        keys = ("turn", "n_tokens", "n_prompt_tokens", "finish", "seed", "seconds")
        rows = [
            {
                "message": i,
                "author": m.author,
                "content": sound(m.content),
                **{k: m.metadata.get(k) for k in keys},
            }
            for i, m in enumerate(self._messages)
        ]
        frame = pandas.DataFrame(rows, columns=["message", "author", "content", *keys])
        for key in ("turn", "n_tokens", "n_prompt_tokens", "seed"):
            frame[key] = _whole([m.metadata.get(key) for m in self._messages])
        return frame.astype({"message": "int64", "seconds": "float64"})

    def to_list(self) -> list[dict[str, Any]]:
        """Plain JSON values, one per message; a prompt refers to the earlier message it extends."""
        places: dict[int, int] = {}
        out = []
        for i, message in enumerate(self._messages):
            out.append(_encode(message, self._messages, places))
            if message.prompt is not None:
                places[id(message.prompt)] = i
        return out

    @classmethod
    def from_list(cls, items: Iterable[dict[str, Any]]) -> "Transcript":
        """The inverse of `to_list`."""
        transcript = cls()
        for item in items:
            transcript._messages.append(_decode(item, transcript._messages))
        return transcript

    def _repr_html_(self) -> str:
        if self.shown is not None and self.shown == (this_cell(), len(self)):
            return html.fold(f"{self!r}; what is new stands above", self.picture())
        return self.picture()

    def picture(self, limit: int = 800_000) -> html.Html:
        """The transcript as HTML of at most about `limit` characters, the last messages open."""
        return html.listing(len(self), self._blocks(lambda s: html.clipped(s, limit // 4)), limit=limit)

    def html_messages(self) -> list[html.Html]:
        """One block per message, each author with a colour of their own; nothing is left out."""
        return [self._blocks(str)(i) for i in range(len(self))]

    def _blocks(self, shown: Callable[[str], str]) -> Callable[[int], html.Html]:
        """Makes the block of a message, by its index."""
        places = self.places()

        def block(i: int) -> html.Html:
            m = self._messages[i]
            return html.said(m.author, shown(m.content), places[m.author], m.note)

        return block

    def places(self) -> dict[str, int]:
        """Authors in the order in which they first spoke, numbered: which colour is whose."""
        return {author: i for i, author in enumerate(dict.fromkeys(m.author for m in self._messages))}


def _whole(values: list[int | None]) -> Any:
    """A column of whole numbers or nothing, exact: as Python's own where one is too large for 64 bits."""
    import pandas

    fit = all(v is None or -(2**63) <= v < 2**63 for v in values)
    return pandas.array(values, dtype="Int64" if fit else "object")


def this_cell() -> Any:
    """The number of the notebook's cell that runs; `None` elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "execution_count", None)


def _encode(message: Message, messages: list[Message], places: dict[int, int]) -> dict[str, Any]:
    """JSON of one message; `places` tells which earlier message holds a prompt."""
    out: dict[str, Any] = {"author": message.author, "content": message.content}
    if message.token_ids is not None:
        out["token_ids"] = list(message.token_ids)
    if message.metadata:
        out["metadata"] = tagged(message.metadata)
    prompt = message.prompt
    if prompt is not None:
        base = prompt.base
        place = places.get(id(base.prompt)) if base is not None else None
        if base is not None and place is not None and messages[place].token_ids == base.token_ids:
            out["prompt"] = {"base": place, "keep": prompt.keep, "added": list(prompt.added)}
        else:
            out["prompt"] = {"added": list(prompt.ids())}
    return out


def _decode(item: dict[str, Any], earlier: list[Message]) -> Message:
    unknown = set(item) - {"author", "content", "token_ids", "metadata", "prompt"}
    if unknown or "author" not in item or "content" not in item:
        raise ValueError(
            f"a stored message has author and content, and no {sorted(unknown)}: found {sorted(item)}"
        )
    prompt = None
    if (stored := item.get("prompt")) is not None:
        if set(stored) not in ({"added"}, {"added", "base", "keep"}):
            raise ValueError(f"a stored prompt has added, or added, base and keep: found {sorted(stored)}")
        place = stored.get("base")
        if place is not None and not 0 <= place < len(earlier):
            raise ValueError(
                f"message {len(earlier)} has a prompt that extends message {place}, which is not earlier"
            )
        base = earlier[place] if place is not None else None
        prompt = Prompt(tuple(stored["added"]), base, stored.get("keep", 0))
    return Message(
        item["author"],
        item["content"],
        token_ids=tuple(item["token_ids"]) if "token_ids" in item else None,
        metadata=untagged(item.get("metadata", {})),
        prompt=prompt,
    )
