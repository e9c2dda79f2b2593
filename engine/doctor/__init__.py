"""`tidekv doctor`: is this machine fit for a worker, and what to do where it is not."""
