"""The one door to what torch does not document.

Every other part of partita uses torch's public names only (ruff enforces it). Each function here is typed
and has a test of its own, so that a new torch breaks one folder, visibly.
"""

import copyreg

from torch.utils._pytree import TreeSpec, treespec_leaf

# A structure's leaf, in copies and pickles: torch has one, of a class that warns whenever another is made.
if type(treespec_leaf()) is not TreeSpec:
    copyreg.pickle(type(treespec_leaf()), lambda _: (treespec_leaf, ()))
