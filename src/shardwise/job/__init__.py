"""Processes of a job: rendezvous, process groups, heartbeats, and their end."""
