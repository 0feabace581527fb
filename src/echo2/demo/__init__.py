"""`echo2 demo`: a model made on the spot learns to sort digits. The examples use parts of it, too."""
