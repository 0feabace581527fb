"""What of a run is kept elsewhere, so that the run outlives its head's disk, and how another head takes it over."""
