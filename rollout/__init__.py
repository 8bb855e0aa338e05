"""Sends the trainer's weights to a rollout: plans the slices of each worker, transfers and verifies them.

A sync (``docs/tour.md``)::

    verl's worker, after an update     the vLLM worker beside this rank     in the vLLM worker's process
    engine/integration/engine.py  -->  sync.py                         -->  vllm/worker.py
    EPFSDP2Engine                      RolloutWeights                       WeightSyncExtension
      .get_per_tensor_param              .for_rollout                         .update_weights_from_ipc
    exports the weights                sends slices or full tensors         loads and verifies
"""
