"""A schedule run on the clock of a cluster: times, memory, the critical path."""
