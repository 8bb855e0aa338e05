"""Commands whose processes all end with them, and the cause in a failed command's log."""
