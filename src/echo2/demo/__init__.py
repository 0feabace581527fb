"""`echo2 demo`: a model made on the spot learns to sort digits. What it is made of serves the examples too."""
