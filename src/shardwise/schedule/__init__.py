"""Pipeline schedules as data: what every rank computes in which order, what it holds, how long it waits."""
