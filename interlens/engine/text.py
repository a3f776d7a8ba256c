"""From tokens to words, one token at a time."""

from typing import Any


class Text:
    """Decodes a reply token by token; characters that are not whole yet are held back."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.offsets: list[int] = []
        self._ids: list[int] = []
        self._done = 0
        """Tokens before this one are decoded for good."""
        self._known = ""
        """What the ids from `_done` on have given so far."""

    def add(self, token: int) -> str:
        """Take a token, return the text that became whole."""
        self._ids.append(token)
        window, new = self._decode(), ""
        if not window.endswith("�"):
            new = window[len(self._known) :]
            self._known = window
            if len(self._ids) - self._done > 8:
                self._move(window)
        self.text += new
        self.offsets.append(len(self.text))
        return new

    def _move(self, window: str) -> None:
        """Decode from the last token on, kept as context: some tokenizers drop the space of a first word, and
        some decode a run of bytes as one, which must not be cut.
        """
        done, self._done = self._done, len(self._ids) - 1
        last = self._decode()
        if last and "�" not in last and window.endswith(last):
            self._known = last
        else:
            self._done = done

    def _decode(self) -> str:
        return str(
            self.tokenizer.decode(
                self._ids[self._done :], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def close(self) -> None:
        """At the end, bytes that never became a character are shown as the decoder shows them."""
        window = self._decode()
        if len(window) > len(self._known) and self.offsets:
            self.text += window[len(self._known) :]
            self.offsets[-1] = len(self.text)
