"""What every operator promises: the problem a backend receives, and the checks that make it."""
