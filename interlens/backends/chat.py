"""What every backend offers to code that has no conversation: messages in, completions out."""

from collections.abc import Mapping, Sequence
from typing import Any

from interlens.request import ChatParams, Completion

Messages = Sequence[Mapping[str, Any]]
Params = ChatParams | Mapping[str, Any] | None


class Chat:
    """Chat calls. They go through the scheduler of the process, so they join the batch of all that runs;
    call them anywhere but inside a program.

    A message is `{"role": "system" | "user" | "assistant" | "tool", "content": …}`; the last one is not the
    assistant's, whose begun words are given as `prefill` (where `capabilities.prefill` is set).
    """

    def generate_chat(
        self, messages: Messages, sampling_params: Params = None, *, prefill: str | None = None
    ) -> Completion:
        """One reply; raises what went wrong. `text` is what was generated, after the prefill."""
        done = self.generate_chat_batch([messages], sampling_params, prefills=[prefill])[0]
        if done.error is not None:
            raise done.error
        return done

    def generate_chat_batch(
        self,
        batch: Sequence[Messages],
        sampling_params: Params = None,
        *,
        prefills: Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """A reply for each, in order; one that failed has an `error` and harms no other."""
        from interlens import asking

        return asking.ask(self, batch, ChatParams.of(sampling_params), prefills=prefills)

    def generate_with_tools_batch(
        self, batch: Sequence[Messages], tools: Sequence[Any], sampling_params: Params = None
    ) -> list[Completion]:
        """A reply for each, in order. Tools are functions, or schemas in OpenAI's form; none is run: what
        the model asks for is in `tool_calls`, each with `id`, `name` and `arguments` (JSON as text).
        """
        from interlens import asking

        return asking.ask(self, batch, ChatParams.of(sampling_params), tools=tools)
