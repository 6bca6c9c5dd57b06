"""Facts about a split model's parameters: their entries, full tensors and replicas."""
