"""What a pipe remembers of the model that it was cut from."""

from __future__ import annotations

import copy
import gc
import pickle

from torch import nn

from partita.pipelining.stages.original_model import OriginalModel


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)))


def test_settings_modes_and_modules_that_changed_are_told_by_path() -> None:
    model = _model()
    original = OriginalModel(model)
    assert not [*original.changed(), *original.switched(), *original.replaced()]
    model[1][0].p, model[1][1].eps = 0.0, 0.1
    model[1][1].eval()
    model[0] = nn.Identity()
    changed = [(str(setting), setting.before, setting.now) for setting in original.changed()]
    assert changed == [("1.0.p", 0.5, 0.0), ("1.1.eps", 1e-5, 0.1)]
    assert list(original.switched()) == [("1.1", False)]
    assert list(original.replaced()) == [("0", model[0])]


def test_what_forward_sets_by_itself_and_what_is_not_a_number_does_not_count() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, [1]

    model = nn.Sequential(Counts())
    original = OriginalModel(model, {"0.calls"})
    model[0].calls, model[0].seen = 3, [2]
    model[0].added = 5
    assert not list(original.changed())


def test_only_settings_that_the_model_has_count_on_what_stands_for_its_modules() -> None:
    original = OriginalModel(_model())
    part = nn.Module()
    part.p, part.tag = 0.5, "mine"
    assert not list(original.set_on({"1.0": part}))
    part.p = 0.25
    assert [str(setting) for setting in original.set_on({"1.0": part, "0": nn.Module()})] == ["1.0.p"]


def test_the_model_is_not_kept_alive_and_copies_know_of_none() -> None:
    model = _model()
    original = OriginalModel(model)
    model[1][0].p = 0.0
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert not list(twin.changed())
    del model
    gc.collect()
    assert not [*original.changed(), *original.switched(), *original.replaced()]
