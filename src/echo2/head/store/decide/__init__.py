"""What must be in the store before what may leave the head, and whose log it is."""
