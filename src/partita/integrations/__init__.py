"""Other libraries' own ways of running and training models, on partita's pipelines: ``accelerate`` and
``transformers``, each in a module of its own, which needs that library (``pip install 'partita[hf]'``).
"""
