"""How ranks talk: the interface, over a process group and within one process."""
