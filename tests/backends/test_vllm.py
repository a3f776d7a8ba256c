"""vLLM, in this process and as a server; run in vLLM's own environment (tests/README.md)."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from interlens import AutoModelParticipant, Capture, Conversation, StopStringCondition
from interlens.backends import HuggingFaceBackend, OpenAIBackend
from interlens.backends.batch_apis import OpenAIBatches
from interlens.backends.openai import OpenAIDialect
from interlens.chat.view import of_messages
from interlens.engine import load
from interlens.request import Generate, SamplingParams
from interlens.runner.scheduler import scheduler
from interlens.seeds import Stream
from interlens.testing import check_backend

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.filterwarnings("error:::interlens"),
]
WORDS = ("cats", "the moon", "Paris", "bread", "time", "rain", "x", "War and Peace")
ASKED = [[{"role": "user", "content": f"Tell me about {word}."}] for word in WORDS]


@pytest.fixture(scope="module")
def person():
    pytest.importorskip("vllm")
    return AutoModelParticipant.from_pretrained("smollm2", name="ana", backend="vllm", max_new_tokens=16)


@pytest.fixture(scope="module")
def backend(person):
    return scheduler().call(lambda: scheduler().pool.get(person.backend))


@pytest.fixture(scope="module")
def ours():
    return HuggingFaceBackend("smollm2")


def test_the_contract_is_kept(backend):
    assert check_backend(backend) == []
    assert not backend.capabilities.capture
    assert not backend.capabilities.exact


@pytest.mark.parametrize("stop", [(), (".",), (" is a", "xyz")])
def test_greedy_replies_are_those_of_our_engine(backend, ours, stop):
    """Two engines, one text: ids, offsets, ends and log-probabilities agree."""
    params = {"temperature": 0, "max_tokens": 24, "stop": stop, "logprobs": 2}
    for a, b in zip(
        backend.generate_chat_batch(ASKED, params), ours.generate_chat_batch(ASKED, params), strict=True
    ):
        assert (a.text, a.token_ids, a.offsets, a.finish, a.n_tokens, a.n_prompt_tokens) == (
            b.text,
            b.token_ids,
            b.offsets,
            b.finish,
            b.n_tokens,
            b.n_prompt_tokens,
        )
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
        assert [[i for i, _ in top] for top in a.top_logprobs] == [
            [i for i, _ in top] for top in b.top_logprobs
        ]


def test_a_prefill_is_continued(backend, ours):
    params = {"temperature": 0, "max_tokens": 12}
    said = [{"role": "user", "content": "Count to three."}]
    found = [b.generate_chat(said, params, prefill="One, two,").text for b in (backend, ours)]
    assert found[0] == found[1] != ""


def test_the_same_seed_gives_the_same_text_whoever_is_beside_it(backend):
    """In float32 on a CPU; vLLM promises less, and so does `capabilities.seeds`."""
    batch = [c.text for c in backend.generate_chat_batch(ASKED, {"temperature": 1.0, "max_tokens": 12})]
    alone = [
        backend.generate_chat(said, {"temperature": 1.0, "max_tokens": 12, "seed": i}).text
        for i, said in enumerate(ASKED)
    ]
    assert batch == alone
    assert len(set(batch)) == len(batch)


def test_a_logit_bias_is_honoured_and_what_vllm_refuses_is_told(backend):
    plain = backend.generate_chat(ASKED[0], {"temperature": 0, "max_tokens": 8})
    banned = {plain.token_ids[0]: float("-inf")}
    other = backend.generate_chat(ASKED[0], {"temperature": 0, "max_tokens": 8, "logit_bias": banned})
    assert other.token_ids[0] != plain.token_ids[0]
    [refused] = backend.generate_chat_batch(ASKED[:1], {"presence_penalty": 100.0})
    assert "presence_penalty" in str(refused.error)


def test_exclusive_rows_run_alone(backend):
    template = AutoModelParticipant.from_pretrained("smollm2", name="x").template
    views = [of_messages(said, template, name="assistant") for said in ASKED[:4]]
    asked = [
        Generate(
            backend=backend,
            prompt=view,
            sampling=SamplingParams(temperature=0),
            max_new_tokens=4,
            stream=Stream(job=i),
            exclusive=i % 2 == 0,
        )
        for i, view in enumerate(views)
    ]
    seen = []

    def drive():
        for request in asked:
            backend.submit(request)
        done = []
        while len(done) < len(asked):
            done += backend.step()
            seen.append(sorted(a.exclusive for a in backend._live.values()))
        return done

    done = scheduler().call(drive)
    assert all(d.finish == "length" for d in done)
    assert [True] in seen
    assert not any(True in live and len(live) > 1 for live in seen)


def test_a_prompt_that_is_too_long_harms_no_other(backend):
    long = [{"role": "user", "content": "word " * (backend.context_limit + 5)}]
    good, bad = backend.generate_chat_batch([ASKED[0], long], {"max_tokens": 3})
    assert good.n_tokens == 3
    assert "shorten it" in str(bad.error)


def test_a_rollout_like_any_other(person, tmp_path):
    other = AutoModelParticipant.from_pretrained("smollm2", name="ben", backend="vllm", max_new_tokens=16)
    conv = Conversation([person, other], shared_context="Talk about the sea. " * 40).turns(3)
    report = conv.rollout(6, out_dir=tmp_path, progress=False)
    assert [r.outcome for r in report.results.values()] == ["done"] * 6
    again = conv.rollout(6, max_batch_size=2, progress=False)
    for a, b in zip(report.transcripts().values(), again.transcripts().values(), strict=True):
        assert [m.content for m in a] == [m.content for m in b]
    message = report.results["rollout_00000"].transcript[-1]
    assert message.metadata["reused_tokens"] > 0  # whole blocks were in the prefix cache
    assert scheduler().pool.get(other.backend) is scheduler().pool.get(person.backend)


def test_a_stop_and_a_logprob_in_a_conversation(person):
    conv = Conversation([person], shared_context="Say yes.").run_until(StopStringCondition(["the"]))
    message = conv.step("ana", logprobs=1)
    assert len(message.metadata["logprobs"]) == message.metadata["n_tokens"]


def test_what_lies_inside_is_refused_and_somebody_else_is_named(person):
    conv = Conversation([person], shared_context="x")
    with pytest.raises(ValueError, match='backend="huggingface"'):
        conv.hook(Capture(layers=[1]))
    with pytest.raises(ValueError, match='backend="huggingface"'):
        conv.step("ana", capture=Capture(layers=[1]))
    with pytest.raises(ValueError, match='backend="huggingface"'):
        person.forward("x")
    assert len(conv.transcript) <= 1


# -- vLLM as a server, and its reader of batch files


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("vllm")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(load.bundled_folder()), "--served-model-name", "smollm2"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **quiet})
    try:
        end = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def test_our_client_against_a_running_server(server, ours):
    backend = OpenAIBackend(model="smollm2", base_url=server)
    params = {"temperature": 0.0, "max_tokens": 16, "logprobs": 0}
    try:
        found = backend.generate_chat_batch(ASKED, params)
        assert [c.text for c in found] == [c.text for c in ours.generate_chat_batch(ASKED, params)]
        assert all(len(c.logprobs) == c.n_tokens == c.usage["output"] for c in found)
        long = [{"role": "user", "content": "word " * 3000}]
        good, bad = backend.generate_chat_batch([ASKED[0], long], {"max_tokens": 4})
        assert good.error is None
        assert type(bad.error).__name__ == "ContextOverflow"
    finally:
        backend.close()


def test_our_batch_file_is_read_by_vllm(tmp_path, ours):
    pytest.importorskip("vllm")
    dialect, api = OpenAIDialect(), OpenAIBatches()
    dialect.cap = "max_tokens"
    lines = []
    for i, said in enumerate(ASKED[:3]):
        request = Generate(
            backend=ours,
            prompt=of_messages(said, None, name="assistant"),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=12,
            stream=Stream(job=i),
        )
        lines.append(api.line(f"row-{i}", dialect.payload(request) | {"model": "smollm2"}))
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(b"".join(lines))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(asked), "-o", str(told)]
    command += ["--model", str(load.bundled_folder()), "--served-model-name", "smollm2"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, timeout=500, env={**os.environ, **quiet})
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["custom_id"]: line for line in map(json.loads, told.read_bytes().splitlines())}
    params = {"temperature": 0, "max_tokens": 12}
    for i, local in enumerate(ours.generate_chat_batch(ASKED[:3], params)):
        assert dialect.read(found[f"row-{i}"]["response"]["body"], {}).text == local.text
