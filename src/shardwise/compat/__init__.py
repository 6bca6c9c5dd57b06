"""The APIs of other systems over ours: scripts written for them run with their import lines changed."""
