"""verl's vLLM worker extension that receives and loads the weights of a sync inside a vLLM worker process.

verl's extension calls ``model.load_weights`` in place and post-processes the model again. This is correct only if a
kernel keeps the checkpoint's layout: vLLM's CPU build drops packed weights, and several GPU kernels permute them. This
extension uses vLLM's layer-wise reload (``reload.py``). Select it with ``engine_kwargs.vllm.worker_extension_cls``.
"""

import logging
import traceback
from collections.abc import Callable
from functools import partial

import torch
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group

from ...engine import cpu
from ...engine.compat.verl_names import quantised_model_test
from ..bitwise.settings import BITWISE
from ..layout.layout_check import actual_layout, difference, named_layers, rank_entry
from ..layout.specs import Rollout
from ..transport.checksums import ReceivedChecksums
from ..transport.watched_sockets import WatchedContext, WeightSyncError
from . import reload_shims
from .adapters import load_adapters, without_adapters
from .compat import ATTENTION, SKIP_LOAD_TENSORS, SKIP_TENSORS, get_layer_tensors, get_layerwise_info
from .reload import Reload

__all__ = ["WeightSyncExtension"]

logger = logging.getLogger(__name__)

_Load = Callable[[list[tuple[str, torch.Tensor]]], None]


class WeightSyncExtension(vLLMColocateWorkerExtension):
    """verl's worker extension with a checked layer-wise reload; see the module's docstring.

    verl's class loads models that are quantised or trained so, unless the received weights are quantised already.
    """

    device: torch.device | None  # set by vLLM's worker

    def __new__(cls, **kwargs):
        cpu.install_in_vllm()
        reload_shims.install()
        if kwargs["vllm_config"].additional_config.get(BITWISE):
            from ..bitwise.worker import install

            install(kwargs["vllm_config"])
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(
        self,
        peft_config: dict | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
        sync_timeout_seconds: float = 300.0,
        verify: bool = False,
        is_quantised: bool = False,
    ) -> None:
        """Receive all weights of the model from this worker's trainer rank and load them, or its adapters alone.

        Raises ``WeightSyncError`` if the sender stopped, or ``Reload.finish`` or checksums find a fault.

        Args:
            sync_timeout_seconds: longest wait for one message, longer than a gather between two buckets.
            verify: whether to compare the sender's checksums, which come last, with the received tensors, and slices
                with the weights that the model then computes with.
            is_quantised: whether quantised values and scales are received, in the layout of the model's parameters.
        """
        quantises = self._is_qat_model or self._is_modelopt_qat or quantised_model_test()(self.model_runner.vllm_config)
        if quantises and not is_quantised:
            return super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        receive = partial(self._receive, use_shm=use_shm, timeout=sync_timeout_seconds, verify=verify)
        if peft_config is not None and base_sync_done:
            adapters: dict[str, torch.Tensor] = {}
            receive(lambda weights: adapters.update((name, tensor.clone()) for name, tensor in weights))
            load_adapters(self, peft_config, adapters)
            return
        models, config = list(self._iter_all_models_with_config()), self.model_runner.vllm_config
        reload = Reload(models, config.parallel_config, verify)
        with set_current_vllm_config(config), torch.no_grad(), without_adapters(*(model for model, _ in models)):
            try:
                reload.start()
                receive(reload.load)
                reload.finish()
            except BaseException:
                reload.abandon()
                raise

    def _receive(self, load: _Load, use_shm: bool, timeout: float, verify: bool) -> None:
        """Receive the buckets of a sync and call ``load`` with each; its memory is reused once that returns."""
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if self.device is None:
            self.device = torch.device(f"{get_device_name()}:{self.local_rank}")
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        waits_for = f"the trainer rank behind {receiver.zmq_handle}"
        # It lingers, because the last acknowledgement is sent right before the socket is closed.
        receiver.zmq_context = WatchedContext(receiver.zmq_context, timeout, waits_for, linger_seconds=5.0)
        failure, received = "", ReceivedChecksums(verify)

        def on_bucket(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # An error must not leave this function: its traceback would keep views of the shared memory alive, whose
            # release would fail and hide the cause. The other buckets are received and dropped, so that the trainer's
            # ranks finish their collectives before the cause reaches them.
            nonlocal failure
            if not failure:
                try:
                    load(received.record(weights))
                except Exception as error:
                    logger.error("weight sync failed:\n%s", traceback.format_exc())
                    failure = f"{type(error).__name__}: {error}"

        receiver.receive_weights(on_bucket_received=on_bucket)
        if failure:
            raise WeightSyncError(f"loading the received weights failed, {failure}")
        if wrong := received.difference():
            raise WeightSyncError(wrong)

    def epfsdp2_check_layout(self, layouts: list[dict[str, str]]) -> None:
        """Raise ``WeightSyncError`` where the layouts planned for a replica's workers differ from this model."""
        parallel, group = self.model_runner.vllm_config.parallel_config, get_tp_group()
        rollout = Rollout(group.world_size, parallel.data_parallel_size, parallel.enable_expert_parallel)
        worker = parallel.data_parallel_rank * group.world_size + group.rank_in_group
        if len(layouts) != (has := rollout.workers):
            raise WeightSyncError(f"the trainer plans for {len(layouts)} workers per replica; vLLM has {has}")
        models = list(self._iter_all_models_with_config())
        model, config = models[0]
        reload_shims.remove_unused(model)
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)

        def is_expected(name: str, own: str, is_parameter: bool) -> bool:
            is_optional = not is_parameter or own in SKIP_LOAD_TENSORS or (tied and name.endswith("lm_head.weight"))
            return name in layouts[worker] or not is_optional

        def built(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
            """Return the layer's tensors as they were built; vLLM does not record those that a reload leaves alone."""
            parameters, buffers = get_layerwise_info(layer).restore_metadata
            unchanged = {name: t for name, t in get_layer_tensors(layer).items() if name in SKIP_TENSORS}
            return {**unchanged, **parameters, **buffers}

        with without_adapters(model):
            # The model comes last, because layers that its drafter shares have the model's names.
            named = {m: name for each, _ in reversed(models) for name, m in named_layers(each)}
            layers = [(name, m, built(m)) for m, name in named.items() if not isinstance(m, ATTENTION)]
        held = actual_layout(layers, rank_entry(group.rank_in_group, rollout), is_expected)
        if wrong := difference(layouts[worker], held):
            raise WeightSyncError(
                f"worker {worker} of a replica: {wrong}. engine.rollout_sync=full works without a plan, and experts "
                "are not padded with actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton."
            )
