"""``generate`` of ``transformers`` over the stages of a pipeline, each with the cache of its own layers.

See :class:`~partita.integrations.generation.pipeline_generator.PipelineGenerator`. Needs ``transformers``
(``pip install 'partita[hf]'``).
"""

from __future__ import annotations

from partita.integrations.generation.cut import cut_for_generation
from partita.integrations.generation.pipeline_generator import GenerationStatistics, PipelineGenerator

__all__ = ["GenerationStatistics", "PipelineGenerator", "cut_for_generation"]
