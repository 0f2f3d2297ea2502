"""What `fdfo top` shows: schedulers asked again and again, rates from what their counters grew by, and the picture."""
