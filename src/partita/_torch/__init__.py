"""The one door to what torch does not document.

Every other part of partita uses torch's public names only (ruff enforces it). Each function here is typed
and has a test of its own, so that a new torch breaks one folder, visibly.
"""
