"""A real SGLang engine in a process of its own: is updated by slices, and says what its workers then hold.

    python -m tests.support.rollout.sglang_engine [--tp TP] [--ep] [--dtype DTYPE] [--generates] FOLDER...

starts an engine on the first folder's model and updates it by slices of each other folder's. It prints a JSON list of
the workers' tensors after each update, or after the start with one folder, and with ``--generates`` their outputs.
After updates it prints the answers to updates that can't be loaded.
"""

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from epfsdp2.engine.cleanup import held_by, remove_unused
from tests.support.rollout.verify import digest

_DIGESTS = "EPFSDP2_TEST_DIGESTS"


def write_digests(model: Any, named_tensors: Any) -> None:
    """A weight loader for SGLang that loads nothing, and writes what this worker holds."""
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    held = {name: digest(tensor) for name, tensor in model.named_parameters()}
    for name, layer in model.named_modules():  # what is computed from them: w_kc, w_vc
        held |= {f"{name}.{own}": digest(it) for own, it in vars(layer).items() if isinstance(it, torch.Tensor)}
    (Path(os.environ[_DIGESTS]) / f"{get_tensor_model_parallel_rank()}.json").write_text(json.dumps(held))


WRITER = "tests.support.rollout.sglang_engine.write_digests"


class _Engine:
    def __init__(self, folder: str, asked: argparse.Namespace):
        from sglang import Engine

        from epfsdp2.rollout.layout.specs import Rollout
        from epfsdp2.rollout.sglang import shims
        from epfsdp2.rollout.sglang.server import SGLANG_LOADER

        shims.send_from_cpu()
        self.rollout = Rollout(asked.tp, expert_parallel=asked.ep, server="sglang")
        self.folder, self.generates = Path(tempfile.gettempdir()), asked.generates
        self.is_first = True
        os.environ[_DIGESTS] = str(self.folder)
        self.engine = Engine(
            model_path=folder,
            tp_size=asked.tp,
            ep_size=asked.tp if asked.ep else 1,
            dtype=asked.dtype,
            device="cpu",
            attention_backend="torch_native",
            disable_overlap_schedule=True,
            disable_cuda_graph=True,
            disable_radix_cache=True,
            max_total_tokens=1024,
            skip_tokenizer_init=True,
            log_level="error",
            custom_weight_loader=[SGLANG_LOADER, WRITER],
        )

    def held(self) -> list[Any]:
        """Digests of each worker's parameters, then the tokens and log-probs of a greedy answer."""
        with self._session():
            self._post([[("nothing", torch.zeros(1))]] * self.rollout.workers, WRITER)
        found = [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(self.rollout.workers)]
        if self.generates:
            sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
            answer = self.engine.generate(input_ids=[5, 9, 3, 17], sampling_params=sampling, return_logprob=True)
            found.append([entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]])
        return found

    def update(self, model: Any, change: Any = lambda units: units) -> list[str]:
        """Send each worker its parameters of a model; return the workers' answers.

        Args:
            change: what to do with a worker's units before they are sent.
        """
        from epfsdp2.engine.topology.dtensor import checkpoint_tensors
        from epfsdp2.rollout.layout.specs import Heads, TensorSpec
        from epfsdp2.rollout.servers import planned_layout
        from epfsdp2.rollout.sglang.adapter import shared_memory
        from epfsdp2.rollout.sglang.bucket import ANSWER_BYTES, Header, answer_of, fill
        from epfsdp2.rollout.sglang.server import SGLANG_LOADER
        from epfsdp2.rollout.transport.checksums import with_checksums
        from tests.support.rollout.units import worker_units

        heads, workers = Heads.of(model.config), range(self.rollout.workers)
        tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
        specs = [TensorSpec(name, tuple(t.shape), t.element_size()) for name, t in tensors.items()]
        layouts = [planned_layout(specs, self.rollout, i, heads) for i in range(self.rollout.workers)]

        def units(worker: int):
            yield from worker_units(tensors, self.rollout, worker, heads)

        streams = []
        for worker in workers:
            memory = [shared_memory(ANSWER_BYTES + (1 << 16)) for _ in range(2)]
            streams.append(list(_copied(fill(with_checksums(change(units(worker))), memory, shared_memory))))
            streams[-1][0][0].layouts, streams[-1][0][0].verify = layouts if self.is_first else None, True
        self.is_first = False
        answers = [""] * len(workers)
        idle = (Header(), shared_memory(ANSWER_BYTES))
        with self._session():
            for turn in range(max(map(len, streams))):
                now = [stream[turn] if turn < len(stream) else idle for stream in streams]
                self._post([[(header.as_text(), memory)] for header, memory in now], SGLANG_LOADER)
                answers = [before or answer_of(memory) for before, (_, memory) in zip(answers, now, strict=True)]
        return answers

    @contextlib.contextmanager
    def _session(self):
        """Hold SGLang's session of an update, where it has them."""
        has_sessions = hasattr(self.engine, "begin_weight_update")
        assert not has_sessions or self.engine.begin_weight_update()[0]
        yield
        assert not has_sessions or self.engine.end_weight_update()[0]

    def stop(self) -> None:
        """End the engine, and remove the message queues of its workers, which SGLang kills."""
        segments = held_by(process.pid for process in psutil.Process().children(recursive=True))
        self.engine.shutdown()
        remove_unused(segments)
        assert not any(map(os.path.exists, segments))

    def _post(self, tensors: list, loader: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(each) for each in tensors],
            load_format=loader,
            flush_cache=False,
        )
        engine = self.engine
        done, message = engine.loop.run_until_complete(
            engine.tokenizer_manager.update_weights_from_tensor(request, None)
        )
        assert done, message


def _copied(stream):
    """Buckets in memory of their own, which all stay."""
    from epfsdp2.rollout.sglang.adapter import shared_memory

    for header, memory in stream:
        copy = shared_memory(memory.numel())
        copy.copy_(memory)
        yield header, copy


def _without_one(slices):
    for turn, each in enumerate(slices):
        if turn != 3:
            yield each


def _of_another_size(slices):
    for turn, (name, values) in enumerate(slices):
        yield name, torch.cat([values, values]) if turn == 3 else values


def _twice(slices):
    for turn, each in enumerate(slices):
        yield each
        if turn == 3:
            yield each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="whole experts, spread over the workers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--generates", action="store_true")
    parser.add_argument("folders", nargs="+")
    asked = parser.parse_args()
    # SGLang leaves its sockets in the folder for temporary files.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        print("RESULT", json.dumps(_run(asked)))


def _run(asked: argparse.Namespace) -> list[list]:
    from transformers import AutoModelForCausalLM

    folders, held, failures = asked.folders, [], []
    engine = _Engine(folders[0], asked)
    try:
        if len(folders) == 1:
            held.append(engine.held())
        for folder in folders[1:]:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert not any(answers := engine.update(model)), answers
            held.append(engine.held())
        if len(folders) > 1:
            failures = [engine.update(model, change)[0] for change in (_without_one, _of_another_size, _twice)]
            assert not any(engine.update(model))  # after failures
            held.append(engine.held())
    finally:
        engine.stop()
    return [held, failures]


if __name__ == "__main__":
    main()
