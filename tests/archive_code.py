"""Functions and classes with an import path, for the tests of saving and loading."""

from interlens import StopCondition, approve


def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


def say_hi(view):
    return "hi"


def review(message, conversation):
    return approve()


def first_name(conv):
    return conv.names[0]


def length(conv):
    return len(conv.transcript)


class Quiet(StopCondition):
    """Stops after a number of short messages; a user's own condition with state."""

    def __init__(self, limit: int) -> None:
        self.limit, self.seen = limit, 0

    def reset(self) -> None:
        self.seen = 0

    def should_stop(self, conv, last_message) -> bool:
        self.seen += last_message is not None
        return self.seen >= self.limit
