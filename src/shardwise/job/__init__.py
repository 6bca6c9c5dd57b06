"""The processes of a job: how they meet, their groups, and what becomes of them."""
