"""What is known of a captured graph: effects, storages, regions, order, liveness, costs."""
