"""A vLLM engine in a process of its own, driven over a pipe: ``python vllm_process.py <socket> <settings as JSON>``."""

import gc
import json
import sys
from multiprocessing.connection import Client


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    def start(settings: dict) -> LLM:
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 16 << 20,
            "distributed_executor_backend": "mp",
        }
        return LLM(**{**defaults, **settings})

    settings = json.loads(sys.argv[2])
    engine = start(settings)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=3, detokenize=False)

    def generate(prompts, adapter=None):
        prompts = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        request = None if adapter is None else LoRARequest(*adapter)
        outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=request)
        return [
            (
                list(output.outputs[0].token_ids),
                [{t: v.logprob for t, v in row.items()} for row in output.outputs[0].logprobs],
                [{t: v.logprob for t, v in row.items()} for row in output.prompt_logprobs if row],
            )
            for output in outputs
        ]

    with Client(sys.argv[1]) as connection:
        connection.send(("ok", None))
        while True:
            command, arguments = connection.recv()
            if command == "exit":
                return
            try:
                if command == "generate":
                    answer = generate(arguments)
                elif command == "generate_adapted":
                    answer = generate(**arguments)
                elif command == "clear":  # what verl's server does after a sync (clear_kv_cache)
                    answer = engine.reset_prefix_cache()
                    engine.llm_engine.reset_mm_cache()
                    engine.llm_engine.reset_encoder_cache()
                elif command == "start":
                    del engine
                    gc.collect()
                    cleanup_dist_env_and_memory()
                    settings |= arguments
                    engine = start(settings)
                    answer = None
                else:
                    answer = engine.collective_rpc(command, kwargs=arguments)
                connection.send(("ok", answer))
            except Exception as error:
                connection.send(("error", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
