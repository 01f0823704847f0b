"""What else can be done with a model that ``torch.export`` can't capture."""

from __future__ import annotations

__all__ = ["ways_out"]


def ways_out(training: bool, other_mode_works: bool) -> str:
    """The end of a refusal.

    Args:
        training: the mode that can't be captured.
        other_mode_works: whether the other one was captured.
    """
    ways = [
        'pipeline(..., frontend="modules") cuts it between calls of its modules and captures nothing: its '
        "own code runs, whatever that reads from tensors"
    ]
    if other_mode_works:
        mode = "eval" if training else "train"
        ways.insert(0, f'modes="{mode}" captures the other mode alone')
    return "Or: " + "; ".join(ways)
