"""`tidekv doctor`: checks whether a machine is fit for a worker, with advice for each deficiency."""
