"""What a refusal says can be done."""

from __future__ import annotations

from partita.capture.ways_out import ways_out


def test_the_other_mode_is_named_where_it_works() -> None:
    assert 'modes="eval"' in ways_out(True, True)
    assert 'modes="train"' in ways_out(False, True)
    assert "modes=" not in ways_out(True, False)
    assert 'frontend="modules"' in ways_out(True, False)
