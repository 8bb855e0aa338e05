"""How weights reach vLLM: what each worker keeps, how it gets there, and the checks that it has.

A sync (``docs/flow.md``)::

    verl's worker, after an update          the vLLM worker beside this rank          in the vLLM worker's process
          |                                          |                                            |
          v                                          v                                            v
    engine/integration/engine.py  -->  sync.py                            -->    vllm/worker.py
    EPFSDP2Engine                      RolloutWeights                            WeightSyncExtension
      .get_per_tensor_param              .for_rollout                              .update_weights_from_ipc
    the engine's weights               full tensors, or the slices               into the parameters,
                                       that this worker keeps                    counted and verified
"""
