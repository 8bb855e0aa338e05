"""Sends the trainer's weights to a rollout: plans what each worker keeps, transfers it, and verifies it.

A sync (``docs/tour.md``)::

    verl's worker, after an update          the vLLM worker beside this rank          in the vLLM worker's process
          |                                          |                                            |
          v                                          v                                            v
    engine/integration/engine.py  -->  sync.py                            -->    vllm/worker.py
    EPFSDP2Engine                      RolloutWeights                            WeightSyncExtension
      .get_per_tensor_param              .for_rollout                              .update_weights_from_ipc
    exports the weights                sends this worker's parameters,           loads, counts and
                                       or full tensors                           verifies them

Between them ``transport/exchange.py`` moves bytes by the plan of ``plan/``, and ``vllm/adapter.py`` fills buckets;
in the worker ``vllm/reload.py`` places them.
"""
