"""A worker extension that takes every bucket and loads none of it: what a broken sync looks like."""

from epfsdp2.rollout.vllm_worker import WeightSyncExtension


class DisabledSync(WeightSyncExtension):
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False, **_):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: None)
