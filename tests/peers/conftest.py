"""A peer, and the official clients that talk to it; nothing is tried twice."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.peers.provider import Provider


@pytest.fixture(scope="package")
def served() -> Iterator[Provider]:
    """Serve from a thread, for all tests of the folder."""
    with Provider() as provider:
        yield provider
        provider.reset()


@pytest.fixture
def peer(served: Provider) -> Iterator[Provider]:
    """Give a peer that knows nothing yet."""
    served.reset()
    yield served
    assert not served.broken, served.broken


@pytest.fixture(scope="package")
def gpt(served: Provider) -> Iterator[openai.OpenAI]:
    """Give OpenAI's client."""
    with openai.OpenAI(base_url=served.openai_url, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def router(served: Provider) -> Iterator[openai.OpenAI]:
    """Give OpenAI's client, talking to OpenRouter."""
    with openai.OpenAI(base_url=served.openrouter_url, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def claude(served: Provider) -> Iterator[anthropic.Anthropic]:
    """Give Anthropic's client."""
    with anthropic.Anthropic(base_url=served.anthropic_url, api_key="key", max_retries=0) as client:
        yield client
