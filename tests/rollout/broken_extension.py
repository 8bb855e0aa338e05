"""A worker extension that goes wrong in the way it is told to: what comparisons have to see."""

from unittest import mock

import torch

from epfsdp2.rollout.vllm.worker import WeightSyncExtension


class BrokenSync(WeightSyncExtension):
    _ignores = True

    def take_and_keep_buckets(self):
        """From now on the tensors of a bucket are kept without copying them; until now, every bucket was dropped."""
        self._ignores = False

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False, **options):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if self._ignores:
            receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
            return receiver.receive_weights(on_bucket_received=lambda weights, is_last: None)
        with mock.patch.object(torch.Tensor, "clone", lambda tensor: tensor):
            return super().update_weights_from_ipc(peft_config, base_sync_done, use_shm, **options)
