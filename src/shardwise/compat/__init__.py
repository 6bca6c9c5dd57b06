"""APIs of other systems on top of ours: scripts written for them run with changed import lines."""
