"""One stage: made from a piece or from a user's module, moved to its device, run forward and backward."""
