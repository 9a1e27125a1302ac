"""What operators ask: the state of a run and of a machine, in words. `problems` decides, the others are shells."""
