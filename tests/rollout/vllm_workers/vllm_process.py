"""vLLM engines in processes of their own, driven over sockets: ``python vllm_process.py``, then a request on each line.

A request is JSON of an engine's ``socket``, ``settings``, ``environment`` and ``log``; the answer is its process's pid.
vLLM takes ten seconds of a core to import, so engines and their workers are forked from a process that has.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Client


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout

    import vllm.v1.worker.cpu_worker  # noqa: F401  (for the workers)
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor

    import epfsdp2.rollout.vllm.worker  # noqa: F401  (for the workers)

    # On a CPU vLLM spawns workers, because some libraries have to be loaded before a worker starts.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    registry._run_in_subprocess = lambda inspect: inspect()  # a process per class would import vLLM again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for an engine
    for line in sys.stdin:
        request = json.loads(line)
        if pid := os.fork():
            print(pid, file=answers, flush=True)
            continue
        answers.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        return serve(request["socket"], request["settings"])
    os._exit(0)  # the tests have ended


def serve(socket: str, settings: dict) -> None:
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

    engine, cached = start(settings), list[int]()
    greedy = {"temperature": 0, "max_tokens": 8, "logprobs": 3, "prompt_logprobs": 3, "detokenize": False}

    def generate(prompts, adapter=None, sampling=None):
        sampling = SamplingParams(**greedy | (sampling or {}))
        prompts = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        request = None if adapter is None else LoRARequest(*adapter)
        nonlocal cached
        outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=request)
        cached = [output.num_cached_tokens for output in outputs]
        return [
            (
                list(output.outputs[0].token_ids),
                [{t: v.logprob for t, v in row.items()} for row in output.outputs[0].logprobs],
                [{t: v.logprob for t, v in row.items()} for row in output.prompt_logprobs or () if row],
            )
            for output in outputs
        ]

    with Client(socket) as connection:
        connection.send(("ok", None))
        while True:
            command, arguments = connection.recv()
            if command == "exit":
                return
            try:
                if command == "generate":
                    answer = generate(**arguments)
                elif command == "cached":  # tokens of each prompt that the last call found in the prefix cache
                    answer = cached
                elif command == "clear":  # as verl's server after a sync (clear_kv_cache)
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
