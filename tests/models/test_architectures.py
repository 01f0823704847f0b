"""A few Hugging Face architectures, as ``docs/models.md`` has many. An encoder with a decoder (T5) is the
example ``translation_hf``, which has its own test.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install 'partita[hf]'", allow_module_level=True)

from tools.models.architecture import make_inputs, make_model
from tools.models.cuts import MICROBATCHES, SAMPLES, Cuts
from tools.models.zoo import ZOO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the library's own warnings are no business of ours
]


@pytest.mark.parametrize(
    "name",
    [
        "llama, own mask",  # no_grad in rotary embeddings, a cache among the outputs, no mask given
        # values that do not lie in memory in plain order
        pytest.param("convnext", marks=pytest.mark.dear),
    ],
)
def test_an_architecture_cut_in_two_is_equal_to_the_model(name: str) -> None:
    (architecture,) = [known for known in ZOO if known.name == name]
    model, config = make_model(architecture)
    cuts = Cuts(model, make_inputs(architecture, config, SAMPLES), stages=2)
    cuts.compare_calls(training=True)
    cuts.compare_calls(training=False)
    cuts.compare_steps(make_inputs(architecture, config, SAMPLES * MICROBATCHES))
