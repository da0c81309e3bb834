"""What runs in the worker processes: the launcher that forks them, and one rank's loop with its networks and jobs."""
