"""Both asynchronous clients behind one function."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from tests.peers.provider import Provider

Asking = Callable[[str, str], Awaitable[str]]


@asynccontextmanager
async def both(peer: Provider) -> AsyncIterator[Asking]:
    """Give one function that asks either provider through its asynchronous client."""
    gpt = openai.AsyncOpenAI(base_url=peer.openai_url, api_key="key", max_retries=0)
    claude = anthropic.AsyncAnthropic(base_url=peer.anthropic_url, api_key="key", max_retries=0)

    async def ask(kind: str, text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        if kind == "openai":
            done = await gpt.chat.completions.create(model="peer-chat", messages=messages)
            return str(done.choices[0].message.content)
        message = await claude.messages.create(model="peer-chat", messages=messages, max_tokens=99)
        return "".join(block.text for block in message.content if block.type == "text")

    async with gpt, claude:
        yield ask
