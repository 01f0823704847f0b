"""Importing it makes a process look for garbage less often, and never among what has been imported before.

A trace makes a million objects that live as long as it does: looking through them after each 700 new ones, as
Python does where nobody says otherwise, takes a tenth of a test's time.
"""

from __future__ import annotations

import gc

gc.set_threshold(20_000, 20, 50)
gc.freeze()
