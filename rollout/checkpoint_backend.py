"""Registers verl's checkpoint engine ``epfsdp2_p2p``; configs import it by this module's name."""

from .remote import checkpoint_engine as checkpoint_engine
