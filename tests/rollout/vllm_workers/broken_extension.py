"""A worker extension with defects that comparisons have to detect."""

from unittest import mock

import torch

from tests.support.rollout.vllm_extension import ReadableWorker


class BrokenSync(ReadableWorker):
    _ignores = True

    def take_and_keep_buckets(self):
        """Keep the tensors of later buckets without copying them, instead of dropping every bucket."""
        self._ignores = False

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False, **options):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if self._ignores:
            receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
            return receiver.receive_weights(on_bucket_received=lambda weights, is_last: None)
        with mock.patch.object(torch.Tensor, "clone", lambda tensor: tensor):
            return super().update_weights_from_ipc(peft_config, base_sync_done, use_shm, **options)
