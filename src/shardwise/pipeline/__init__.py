"""Pipeline parallelism as it runs: stages in a schedule's order, forward, backward and generation."""
