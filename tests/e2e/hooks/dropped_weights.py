"""A test hook: vLLM joins every weight sync and drops the weights."""

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

from epfsdp2.rollout.vllm.worker import WeightSyncExtension


class DroppedWeights(WeightSyncExtension):
    """Answers the trainer as the real extension does, so that only the check of the result can notice."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False, **_kwargs):
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: None)
