"""For the cells of tests: a speaker whose words come one after the other, as those of a model do."""

SLOW = """
import time
from interlens import Conversation, ModelParticipant
from interlens.backends import ScriptedBackend

class Slow(ScriptedBackend):
    "Says the reply of its script a word at a time, `every` seconds."
    every, words, tell = 0.05, (), None
    def submit(self, request, on_delta=None):
        ticket = super().submit(request)
        [(_, number, done)] = self._due
        self.words, self.tell, self.next = done.text.split(" "), on_delta, time.monotonic()
        self._due[:] = [(self.next + self.every * len(self.words), number, done)]
        return ticket
    def step(self, timeout=0):
        while self.live and self.words and time.monotonic() >= self.next:
            word = self.words.pop(0)
            if self.tell is not None:
                self.tell(word + " " if self.words else word)
            self.next += self.every
        return super().step(min(timeout, self.every / 2))

def slow(name, script, every=0.05):
    backend = Slow(script)
    backend.every = every
    return ModelParticipant(name=name, backend=backend, max_new_tokens=100_000)
"""
"""`slow(name, script, every)` makes one; a script is a list of replies or a function of the request."""
