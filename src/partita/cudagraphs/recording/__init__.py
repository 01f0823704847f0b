"""Recording a region and replaying it: on a GPU, or strictly on the CPU."""
