"""The chat calls that every backend has."""

import json

import pytest

from interlens import AutoModelParticipant, Conversation, FunctionParticipant, backends
from interlens.backends import HuggingFaceBackend, OpenAIBackend, OpenRouterBackend, ScriptedBackend
from interlens.chat.template import ChatTemplate
from interlens.chat.view import of_messages
from interlens.engine.load import read_tokenizer
from interlens.request import ChatParams, Completion
from interlens.testing import tiny
from tests.peers.provider import Provider

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def local():
    return HuggingFaceBackend(*tiny(), name="tiny")


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with Provider() as provider:
        yield provider


@pytest.fixture
def hosted():
    """Makes hosted backends, and closes them."""
    made = []

    def make(kind, **options):
        made.append(kind(model="gpt", **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def reply_of(model, tokenizer, messages, prefill=""):
    """What transformers itself would say: its own template, its own generate, one at a time."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + prefill
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, do_sample=False, max_new_tokens=8, use_cache=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_batch_says_what_transformers_says_one_at_a_time():
    backend = HuggingFaceBackend("smollm2")
    batch = [
        ASKED,
        [{"role": "user", "content": "What is two and two?"}],
        [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue."},
            {"role": "user", "content": "Another one, please."},
        ],
    ]
    found = backend.generate_chat_batch(batch, {"temperature": 0, "max_tokens": 8})
    assert [c.text for c in found] == [reply_of(backend.model, backend.tokenizer, m) for m in batch]
    begun = "The answer"
    done = backend.generate_chat(batch[1], {"temperature": 0, "max_tokens": 8}, prefill=begun)
    assert done.text == reply_of(backend.model, backend.tokenizer, batch[1], begun)


def test_row_i_draws_from_seed_plus_i(local):
    params = ChatParams(temperature=1.0, max_tokens=6, seed=5)
    rows = [c.text for c in local.generate_chat_batch([ASKED, ASKED, ASKED], params)]
    assert len(set(rows)) == 3
    assert rows[2] == local.generate_chat(ASKED, {"temperature": 1.0, "max_tokens": 6, "seed": 7}).text


def test_one_bad_row_harms_no_other(local):
    long = [{"role": "user", "content": "word " * 5000}]
    odd = [{"role": "wizard", "content": "x"}]
    good, bad, other, empty = local.generate_chat_batch([ASKED, long, odd, []], {"max_tokens": 3})
    assert good.error is None
    assert good.n_tokens == 3
    assert "shorten it" in str(bad.error)
    assert "got 'wizard'" in str(other.error)
    assert "prefill=" in str(empty.error)
    with pytest.raises(ValueError, match="shorten it"):
        local.generate_chat(long)
    assert local.generate_chat_batch([]) == []


def test_an_unknown_parameter_is_refused_with_the_nearest_name(local):
    with pytest.raises(TypeError, match='did you mean "temperature"'):
        local.generate_chat(ASKED, {"temprature": 1})
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        local.generate_chat(ASKED, {"max_tokens": 0})
    with pytest.raises(ValueError, match="2 lists of messages and 1 prefills"):
        local.generate_chat_batch([ASKED, ASKED], prefills=["x"])


def test_a_system_message_in_the_middle_is_refused():
    said = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, ASKED[1]]
    with pytest.raises(ValueError, match="a system message comes first"):
        of_messages(said, None, name="assistant")


def test_hosted_calls_send_what_was_set_and_nothing_else(peer, hosted):
    backend = hosted(OpenAIBackend, base_url=peer.openai_url)
    rows = [[{"role": "user", "content": f"row {i}"}] for i in range(5)]
    found = backend.generate_chat_batch(rows, {"max_tokens": 30})
    assert [f"row {i}" in c.text for i, c in enumerate(found)] == [True] * 5
    assert all("temperature" not in call.body for call in peer.calls)
    with pytest.raises(ValueError, match="prefill"):
        backend.generate_chat(ASKED, prefill="Well")
    assert not backend.capabilities.prefill


def test_tools_are_described_to_a_hosted_model_and_its_calls_returned(monkeypatch, hosted):
    monkeypatch.setenv("OPENAI_API_KEY", "key")

    def weather(city: str) -> str:
        """The weather of a city."""
        raise AssertionError("nobody runs it")

    asked = {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}
    with Provider(reply=lambda body, kind: asked) as peer:
        backend = hosted(OpenAIBackend, base_url=peer.openai_url)
        [done] = backend.generate_with_tools_batch([ASKED], [weather], {"max_tokens": 9})
        assert peer.calls[-1].body["tools"][0]["function"]["name"] == "weather"
    assert done.finish == "tools"
    assert [(c["name"], json.loads(c["arguments"])) for c in done.tool_calls] == [
        ("weather", {"city": "Oslo"})
    ]


def test_calls_of_a_local_model_are_read_from_its_words():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    backend = ScriptedBackend(lambda request: text)
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    [done] = backend.generate_with_tools_batch([ASKED], [schema])
    assert [(c["name"], json.loads(c["arguments"])) for c in done.tool_calls] == [("add", {"a": 1})]
    assert backend.requests[0].tools == (schema,)


def test_earlier_calls_are_written_as_the_template_writes_them():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [
        ASKED[1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    text = of_messages(said, ChatTemplate(read_tokenizer("smollm2")), name="assistant").text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert text.index("<tool_call>") < text.index("2<|im_end|>")
    plain = of_messages(said, None, name="assistant")
    assert plain.messages[1]["tool_calls"][0]["name"] == "add"
    assert plain.messages[2]["tool_call_id"] == "1"


def test_a_call_from_inside_a_run_is_logged_and_not_made_twice(tmp_path):
    """A participant that is a function may call a backend; a resumed run reads the log."""
    backend = ScriptedBackend(lambda request: f"heard {request.prompt.messages[-1]['content']}")

    def ask(view):
        return backend.generate_chat([{"role": "user", "content": "a question"}]).text

    conv = Conversation([FunctionParticipant("ana", ask)], shared_context="x").turns(2)
    report = conv.rollout(2, out_dir=tmp_path, progress=False)
    assert [m.content for m in report.results["rollout_00000"].transcript][1:] == ["heard a question"] * 2
    assert len(backend.requests) == 4


def test_capabilities_say_who_can_be_continued(hosted):
    assert HuggingFaceBackend(*tiny()).capabilities.prefill
    assert ScriptedBackend([]).capabilities.prefill
    assert not hosted(OpenRouterBackend, api_key="k").capabilities.prefill


def test_the_public_names_are_there():
    for name in ("AnthropicBackend", "HuggingFaceBackend", "OpenAIBackend", "OpenRouterBackend"):
        assert hasattr(getattr(backends, name), "generate_chat_batch")
    with pytest.raises(AttributeError, match="no attribute 'OpenAi'"):
        backends.OpenAi  # noqa: B018


def test_a_hosted_backend_can_answer_a_participant_and_shows_no_key(peer, hosted):
    from interlens import APIParticipant

    backend = hosted(OpenAIBackend, base_url=peer.openai_url, api_key="secret-key")
    person = APIParticipant("judge", backend=backend)
    conv = Conversation([person], shared_context="Hello")
    conv.run(turns=1)
    assert "secret" not in repr(backend) + repr(backend.spec) + repr(person) + json.dumps(person.describe())
    assert isinstance(backend.generate_chat(ASKED), Completion)


def test_the_other_backend_of_local_models_is_named_and_refused_by_name():
    with pytest.raises(ValueError, match='did you mean "vllm"'):
        AutoModelParticipant.from_pretrained("tiny", name="a", backend="vlm")
    person = AutoModelParticipant.from_pretrained("tiny", name="ana", backend="vllm")
    assert person.backend.kind == "vllm"
    from interlens import Capture

    with pytest.raises(ValueError, match=r'ana runs in vLLM .backend="huggingface" can be looked into'):
        Conversation([person], shared_context="x").hook(Capture(layers=[0]))
    with pytest.raises(ValueError, match="max_memory and adapter are for"):
        AutoModelParticipant.from_pretrained("tiny", name="a", backend="vllm", adapter="x")
