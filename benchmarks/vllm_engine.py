"""vLLM's CPU build, in one process, prefix caching on; read by the interpreter of vLLM's own environment."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # everything in this process: its CPU time is vLLM's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # like the other engines
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from vllm import LLM, SamplingParams  # it reads the settings above
from vllm.sampling_params import RequestOutputKind
from workloads import Conversation, History, advance


class Vllm:
    """Requests go straight to vLLM's engine, so that conversations advance on their own."""

    packages = ("vllm-cpu",)

    def __init__(self, model: str, dtype: str) -> None:
        self.llm = LLM(
            model,
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=64,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=0,
        )
        self.notes: dict[str, Any] = {}

    def run(self, conversations: Sequence[Conversation]) -> list[History]:
        """Run the conversations with an empty prefix cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")
        engine = self.llm.llm_engine

        def submit(number: int, conversation: Conversation, history: History) -> str:
            new = conversation.replies[len(history)]
            params = SamplingParams(
                temperature=0.9,
                max_tokens=new,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            name = f"{number}/{len(history)}"
            engine.add_request(name, {"prompt_token_ids": conversation.prompt(history)}, params)
            return name

        def step() -> Iterable[tuple[str, Sequence[int]]]:
            return [(o.request_id, o.outputs[0].token_ids) for o in engine.step() if o.finished]

        return advance(conversations, submit, step)
