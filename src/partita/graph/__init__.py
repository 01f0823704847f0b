"""Analyses of an fx graph: effects, storages, regions, order, liveness, costs. Nothing is changed."""
