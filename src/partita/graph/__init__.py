"""Analyses of an fx graph: effects, storages, regions, order, liveness. Nothing is changed."""
