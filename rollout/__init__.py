"""Sends the trainer's weights to a rollout: plans what each worker keeps, transfers it, and verifies it.

A sync (``docs/flow.md``)::

    verl's worker, after an update          the vLLM worker beside this rank          in the vLLM worker's process
          |                                          |                                            |
          v                                          v                                            v
    engine/integration/engine.py  -->  sync.py                            -->    vllm/worker.py
    EPFSDP2Engine                      RolloutWeights                            WeightSyncExtension
      .get_per_tensor_param              .for_rollout                              .update_weights_from_ipc
    exports the weights                sends full tensors, or the                loads, counts and
                                       slices that this worker keeps             verifies them
"""
