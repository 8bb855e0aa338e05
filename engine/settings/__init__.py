"""What a setting may be, and how the settings of a role are put together."""
