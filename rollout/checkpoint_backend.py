"""verl's checkpoint engine ``epfsdp2_p2p`` under the name that configs have; ``remote/checkpoint_engine.py`` has it."""

from .remote import checkpoint_engine as checkpoint_engine
