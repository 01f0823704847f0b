"""Whether the next backward pass is reduced: what the forward passes before it say."""

from __future__ import annotations

__all__ = ["NextPass"]


class NextPass:
    """Forward passes since the last backward pass, and what they say of the next one.

    Attributes:
        synced: gradients of the next backward pass are reduced. One that no forward pass came before is as
            the last one was.
    """

    def __init__(self) -> None:
        self.synced = True
        self._is_new = True
        self._trains = False

    def forward_begins(self, *, sync: bool, trains: bool) -> None:
        """Note a forward pass with gradients.

        Args:
            sync: its gradients are to be reduced.
            trains: the module is in training mode. Where it is not, a rank may be alone in the pass, which
                counts only where no pass in training mode does.
        """
        if self._is_new or (trains and not self._trains):
            self.synced, self._trains, self._is_new = sync, trains, False
        elif trains == self._trains:
            self.synced = self.synced or sync

    def begins(self) -> None:
        """Note that the backward pass has begun."""
        self._is_new = True
