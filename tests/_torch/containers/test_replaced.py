from __future__ import annotations

import pytest

from partita._torch.containers.replaced import replaced


class Parent:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


class Child(Parent):
    own = 1


def _replaced_until_an_error() -> None:
    with replaced(Child, "own", 2), replaced(Child, "name", str):
        assert (Child.own, Child.name, Parent.name()) == (2, str, "Parent")
        raise ValueError("an error ends the block, too")


def test_an_attribute_comes_back_as_it_was_own_or_inherited() -> None:
    with pytest.raises(ValueError, match="ends"):
        _replaced_until_an_error()
    assert (Child.own, Child.name()) == (1, "Child")
    assert "name" not in vars(Child)
    with replaced(Parent, "name", classmethod(lambda cls: cls)):
        assert Child.name() is Child  # type: ignore[comparison-overlap]
    assert Child.name() == "Child"
