"""One stream spoken to in turns, in one slot: `.venv/bin/python examples/session.py`.

vLLM's streaming input. A turn's last token is not part of the stream: vLLM leaves its place to what
the client says next. `--questions` are the turns; the model is the default one.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on shared cores, more are slower
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_bounded_kv.default_model import ensure_default_model

QUESTIONS = ["Name a river.", "In which country is it?", "And what else is that country known for?"]


async def talk(questions: list[str]) -> None:
    """Ask the questions one after another, in one session."""
    args = AsyncEngineArgs(
        model=str(ensure_default_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1_000_000,
        max_num_seqs=2,
        kv_cache_memory_bytes=256 << 20,
        additional_config={
            "kv_plugin": "bounded",
            # A session that falls silent for a minute is ended.
            "bounded_kv": {"sink": 4, "window": 508, "session_idle_s": 60},
        },
    )
    llm = AsyncLLM.from_engine_args(args)
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    answered = asyncio.Event()

    async def said() -> AsyncGenerator[StreamingInput, None]:
        ends_last = ""
        for question in questions:
            print(f"\n> {question}")
            answered.clear()
            text = f"{ends_last}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ends_last = "<|im_end|>\n"  # the answer's own was its last token
            yield StreamingInput(text, params)
            await answered.wait()

    async for output in llm.generate(said(), params, "session"):
        for answer in output.outputs:
            print(answer.text, end="", flush=True)
            if answer.finish_reason is not None:
                answered.set()
    print()
    llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", nargs="+", default=QUESTIONS)
    asyncio.run(talk(parser.parse_args().questions))
