"""What can be learnt: a task brings model, loss and metric together for the loop."""
