"""The table of architectures, a part of ``docs/models.md`` each: what is in it, and how a row is made."""
