"""What is known of a split model's parameters: their entries, their full tensors, their replicas."""
