"""Training: meshes, expert dispatch, FSDP2 wrapping, loading, optimizers and the engines behind verl's interface.

An update (``docs/tour.md``)::

    engine=epfsdp2                       verl's worker, for every mini-batch           once, when the model is built
          |                                          |                                            |
          v                                          v                                            v
    config/roles.py             -->    integration/engine.py              -->    parallelize.py
    engine_config                      EPFSDP2Engine.train_batch                 parallelize
    settings, checked;                 verl's forward, backward and loss,        experts over ep, FSDP2 bottom-up,
    the engines are registered         with this engine's methods                one divide factor, prefetch
"""
